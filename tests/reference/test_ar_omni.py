# SPDX-License-Identifier: Apache-2.0
"""Thinker and talker, live, against transformers' generate(return_audio=True): every token, all codes of all frames."""

from __future__ import annotations

import gc

import pytest

from tests.kit.ar_worker import become_ar_worker
from tests.kit.engine_chain import Chain
from tests.kit.gpu_devices import VLLM_DEVICES
from tests.kit.omni_chats import CHATS, FRAMES, check, come_and_go, engines, free_blocks, references, request
from tests.kit.tiny_omni import Reference, tiny_omni
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling, SpeechParams
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE

become_ar_worker()
pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_omni(tmp_path_factory.mktemp("tiny_omni"))


@pytest.fixture(scope="module")
def reference(folder):
    return references(Reference(folder))


@pytest.fixture(scope="module", params=VLLM_DEVICES)
def chain(request, folder):
    chain = Chain(PIPELINE, engines(folder, device=request.param))
    yield chain
    chain.close()
    gc.collect()


def test_alone_equals_transformers(chain, reference):
    for place, spoken in enumerate(reference):
        job = chain.open(request(place))
        chain.run()
        check(job, spoken)


def test_together_equals_transformers(chain, reference):
    jobs = [chain.open(request(place)) for place in range(len(CHATS))]
    chain.run()
    for job, spoken in zip(jobs, reference, strict=True):
        check(job, spoken)


@pytest.mark.parametrize("seed", range(4))
def test_joining_leaving_and_uneven_stages_change_nothing(chain, reference, seed):
    jobs = come_and_go(chain, seed, {"thinker": 1, "talker": seed + 1})
    for place, job in jobs.items():
        check(job, reference[place])


def test_speech_starts_before_the_text_has_ended(chain):
    job = chain.open(request(2))
    chain.run()
    first_frame = job.order.index(("talker", "EngineChunk"))
    last_text = len(job.order) - 1 - job.order[::-1].index(("thinker", "EngineOutput"))
    assert first_frame < last_text


def test_a_talker_without_words_sleeps(chain):
    """It has said all that was written; until the next word comes it is not busy, and loses nothing."""
    job = chain.open(request(0))
    while not job.sent("talker", "codes").size:
        chain.turn()
    for _ in range(50):
        chain.turn("talker")
    assert not chain.engines["talker"].has_work
    spoken = len(job.sent("talker", "codes"))
    assert 0 < spoken < 5
    chain.turn()
    assert len(job.sent("talker", "codes")) == spoken + 1
    chain.run()


def test_a_talker_whose_consumer_is_full_waits_and_loses_nothing(chain, reference):
    job, other = chain.open(request(0)), chain.open(request(1))
    while not job.sent("talker", "codes").size:
        chain.turn()
    job.runs["talker"].blocked = True
    spoken = len(job.sent("talker", "codes"))
    while not (other.over("talker") and job.over("thinker")):
        chain.turn()
    assert len(job.sent("talker", "codes")) == spoken
    assert not chain.engines["talker"].has_work
    job.runs["talker"].blocked = False
    chain.run()
    check(job, reference[0])
    check(other, reference[1])


def test_an_answer_of_one_token_is_silence(chain):
    job = chain.open(GenerateRequest(messages=(Message("user", "x"),), sampling=Sampling(max_tokens=1)))
    chain.run()
    assert len(job.tokens()) == 1
    assert job.sent("talker", "codes").size == 0
    assert job.end("talker").reason == "stop"


def test_an_answer_without_a_word_is_silence(chain, folder):
    """The model is made to end at once."""
    end = Reference(folder).model.config.im_end_token_id
    job = chain.open(request(0, sampling=Sampling(temperature=0.0, max_tokens=9, logit_bias={str(end): 90.0})))
    chain.run()
    assert job.text() == "" and job.tokens() == [end]
    assert job.sent("talker", "codes").size == 0
    assert [job.end(stage).reason for stage in ("thinker", "talker")] == ["stop", "stop"]


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 6, 12])
def test_stopped_at_any_time_everything_is_free_again(chain, reference, turns):
    free = free_blocks(chain)
    job, other = chain.open(request(0)), chain.open(request(5))
    for _ in range(turns):
        chain.turn()
    chain.stop(job)
    chain.run()
    check(other, reference[5])
    assert free_blocks(chain) == free
    assert not chain.engines["talker"].gate.runs
    assert not any(engine.has_work for engine in chain.engines.values())


def test_voices_are_the_checkpoints(chain, folder):
    chat, tokens = CHATS[0]
    spoken = Reference(folder).speak([{"role": r, "content": t} for r, t in chat], tokens, FRAMES, speaker="Chelsie")
    job = chain.open(request(0, speech=SpeechParams(voice="Chelsie")))
    chain.run()
    check(job, spoken)
    with pytest.raises(BadRequest, match="aiden, chelsie, ethan") as caught:
        chain.open(request(0, speech=SpeechParams(voice="unknown")))
    assert caught.value.where == "speech.voice"
    assert not any(engine.has_work for engine in chain.engines.values())
