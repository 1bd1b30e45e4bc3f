# SPDX-License-Identifier: Apache-2.0
"""The toy engines pass the engine contract, and misbehave exactly as asked."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.kit.engine_contract import CHECKS, Subject, check_name, feed_all
from tests.kit.worker_harness import chat
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import EngineChunk, EngineFailed, EngineFinished, EngineOutput, EngineProgress
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.generate import GenerateRequest, Message, Part, SpeechParams
from triton_omni.backends.core.outputs import TextPiece
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.orchestrator.check import check_request
from triton_omni.backends.pipelines import load
from triton_omni.backends.pipelines.toy import engines
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE


def make(stage):
    return PIPELINE.stage(stage).engine(EngineContext("toy", stage, {}))


SUBJECTS = {
    "tokens": Subject(
        lambda: make("tokens"), chat(5), chat(5, tokens={"refuse": True}), wanted=frozenset({"text"})
    ),
    "frames": Subject(
        lambda: make("frames"), chat(5), chat(5, frames={"burst": 0}), "tokens", inputs=(0, 1, 2, 3, 4, 5, 6, None)
    ),
    "frames as entry": Subject(lambda: make("frames"), GenerateRequest("speech", input="a few words to speak")),
    "wave": Subject(
        lambda: make("wave"), chat(5), chat(5, wave={"nonsense": 1}), "frames", inputs=(2, 2, 0, 2, 2, 2, 0),
        wanted=frozenset({"audio"}), feeds=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("check_", CHECKS, ids=check_name)
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=list(SUBJECTS))
def test_contract(subject, check_):
    check_(subject)


def run_alone(stage, request):
    subject = SUBJECTS[stage]
    engine, run = make(stage), subject.run(request)
    engine.open(run)
    return feed_all(engine, subject, [run])[run.id]


def test_tokens_and_their_usage():
    events = run_alone("tokens", chat(3))
    assert [e.piece.text for e in events if isinstance(e, EngineOutput)] == ["w0 ", "w1 ", "w2 "]
    assert [e.piece.token_ids for e in events if isinstance(e, EngineChunk)] == [(0,), (1,), (2,)]
    assert events[-1].usage == {"prompt_tokens": 3, "completion_tokens": 3}


def test_the_sine_goes_on_without_a_break():
    audio = np.concatenate([e.tensors[0].data for e in run_alone("wave", chat()) if isinstance(e, EngineOutput)])
    assert np.array_equal(audio, engines.sine(0, 10 * engines.SAMPLES_PER_FRAME))
    assert audio.dtype == np.float32
    assert 0.24 < np.abs(audio).max() <= 0.25


def test_frames_carry_their_tokens_number():
    sent = [e for e in run_alone("frames", chat(2)) if isinstance(e, EngineChunk)]
    assert [e.piece.token_ids[0] for e in sent] == list(range(7))
    for e in sent:
        assert engines.rows_of(Chunk(b"r", "frames", 0, False, e.tensors, e.piece)) == engines.FRAMES_PER_TOKEN


def test_misbehaviour_on_request():
    assert isinstance(run_alone("tokens", chat(9, tokens={"fail_after": 2}))[-1], EngineFailed)
    events = run_alone("tokens", chat(2, tokens={"progress": True}))
    assert [event.done for event in events if isinstance(event, EngineProgress)] == [0, 1]
    engine, run = make("tokens"), SUBJECTS["tokens"].run(chat(9, tokens={"hold_after": 3, "burst": 5}))
    engine.open(run)
    assert len([e for e in engine.step() if isinstance(e, EngineOutput)]) == 3
    assert not engine.has_work
    engine, run = make("tokens"), SUBJECTS["tokens"].run(chat(9, tokens={"raise_after": 0}))
    engine.open(run)
    with pytest.raises(RuntimeError, match="raised on request"):
        engine.step()
    engine, run = make("tokens"), SUBJECTS["tokens"].run(chat(9, tokens={"hang_after": 0, "hang_s": 0.001}))
    engine.open(run)
    assert engine.step()
    engine, run = make("tokens"), SUBJECTS["tokens"].run(chat(9, tokens={"delay_s": 60.0}))
    engine.open(run)
    assert engine.step()
    assert engine.step() == ()
    run.blocked = True
    assert not engine.has_work


def test_runs_that_wait_for_one_another_begin_together_and_end_apart():
    engine, subject = make("tokens"), SUBJECTS["tokens"]
    runs = [subject.run(chat(count, tokens={"together": 3})) for count in (1, 2, 3)]
    for run in runs[:2]:
        engine.open(run)
    assert not engine.has_work
    engine.open(runs[2])
    ends = [event.run for _ in range(3) for event in engine.step() if isinstance(event, EngineFinished)]
    assert ends == runs
    assert not engine.has_work


def test_dying_on_request_is_a_kill():
    code = (
        "from triton_omni.backends.core.engine import Run\n"
        "from triton_omni.backends.pipelines.toy.pipeline import PIPELINE\n"
        "from triton_omni.backends.core.pipeline import EngineContext\n"
        "from triton_omni.backends.core.generate import GenerateRequest\n"
        "engine = PIPELINE.stage('tokens').engine(EngineContext('toy', 'tokens', {}))\n"
        "engine.open(Run(b'r', 'r', GenerateRequest(stages={'tokens': {'die_after': 0}})))\n"
        "engine.step()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -9


def test_payloads_are_checked_where_they_arrive():
    sent = [e for e in run_alone("tokens", chat(3, tokens={"frame_bytes": 50})) if isinstance(e, EngineChunk)]
    for index, e in enumerate(sent):
        assert engines.token_of(Chunk(b"r", "tokens", index, False, e.tensors, e.piece)) == index
    with pytest.raises(StageFailed, match="payload is not what was sent"):
        engines.token_of(Chunk(b"r", "tokens", 2, False, sent[0].tensors))
    wrong = Tensor.of("frames", np.ones((2, 8), np.float32))
    with pytest.raises(StageFailed, match="frames are not what was sent"):
        engines.rows_of(Chunk(b"r", "frames", 0, False, (wrong,), TextPiece(token_ids=(5,))))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest(messages=(Message("user", "x"),), speech=SpeechParams(voice="bob")), "speech.voice"),
        (GenerateRequest(messages=(Message("user", "x"),), speech=SpeechParams(language="fr")), "speech.language"),
        (GenerateRequest("speech", input="  "), "input"),
        (GenerateRequest(), "messages"),
        (GenerateRequest(messages=(Message("user", (Part("image", shape=(1,)),)),)), "messages[0].content[0]"),
        (chat(1, nose={}), "stages.nose"),
        (chat(1, wave={"delay_s": -1}), "stages.wave.delay_s"),
        (chat(1, wave={"typo": 1}), "stages.wave.typo"),
    ],
)
def test_what_the_toy_cannot_do_is_named(request_, field):
    with pytest.raises(BadRequest) as caught:
        check_request(PIPELINE, request_, {})
    assert caught.value.where == field


def test_the_pipeline_is_found_by_its_folder():
    assert load("toy") is PIPELINE
    assert {type(e) for e in run_alone("wave", chat())} == {EngineOutput, EngineFinished}
    with pytest.raises(LookupError, match="there is no pipeline 'nothing'"):
        load("nothing")
