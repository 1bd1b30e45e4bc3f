# SPDX-License-Identifier: Apache-2.0
"""Times of words: the aligner against transformers on a tiny checkpoint; what a failing, late or stopped one costs."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from tests.kit.ar_worker import become_ar_worker
from tests.kit.engine_chain import Chain
from tests.kit.tiny_aligner import tiny_aligner
from tests.kit.tiny_tts import tiny_tts
from tests.kit.tts_runs import SPOKEN, recording, request, stage
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import EngineFailed, EngineFinished, EngineOutput, OptionsError, Run
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, SpeechParams
from triton_omni.backends.core.outputs import WordsPiece, WordTime
from triton_omni.backends.orchestrator.check import check_request
from triton_omni.backends.pipelines.qwen3_tts.aligner import AlignerEngine, load_aligner
from triton_omni.backends.pipelines.qwen3_tts.pipeline import PIPELINE

become_ar_worker()
pytestmark = pytest.mark.timeout(120)
PATIENCE_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny_aligner")


@pytest.fixture(scope="module")
def model(folder):
    return tiny_aligner(folder)


@pytest.fixture(scope="module")
def voices(tmp_path_factory):
    return tiny_tts(tmp_path_factory.mktemp("tiny_tts"))


class WokenEngine(AlignerEngine):
    """`woken` is set when its thread has done something."""

    def __init__(self, aligner: Any, max_audio_s: float) -> None:
        self.woken = threading.Event()
        super().__init__("aligner", aligner, max_audio_s, self.woken.set)


class RecordedAligner:
    """Keeps what it is asked, and waits or raises as a test says."""

    def __init__(self):
        self.asked = []
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.error = None

    def words(self, text):
        return [word for word in text.split() if word.isalnum()]

    def align(self, words, samples):
        self.asked.append((tuple(words), samples.copy()))
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return tuple(WordTime(word, i / 10, (i + 1) / 10) for i, word in enumerate(words))


@pytest.fixture
def recorded():
    return RecordedAligner()


@pytest.fixture
def words(recorded):
    """An aligner stage behind code2wav, driven by hand."""
    engine = WokenEngine(recorded, 180.0)
    yield engine
    recorded.may_go_on.set()
    engine.close()


def opened(engine, text="one two ..."):
    run = Run(os.urandom(16), "r", GenerateRequest(operation="speech", input=text), upstream=frozenset({"code2wav"}))
    engine.open(run)
    return run


def done(engine):
    """Events of the step after the thread has done its work."""
    assert engine.woken.wait(PATIENCE_S)
    engine.woken.clear()
    assert engine.has_work
    return engine.step()


# --- the network ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seconds", [0.3, 2.3, 12.0])
def test_times_are_those_of_transformers(folder, model, seconds):
    """The prompt is made by hand here: a token of audio for each eighth mel frame of whole seconds, and words between
    their two markers."""
    import torch
    from transformers import Qwen2Tokenizer
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
    from transformers.models.qwen3_asr.processing_qwen3_asr import _fix_timestamps

    from triton_omni.backends.core.audio import resampled

    aligner = load_aligner(folder)
    spoken = aligner.words("Hello, world! It's 你好.")
    assert spoken == ["Hello", "world", "It's", "你", "好"]
    samples = recording(seconds)
    features = Qwen3ASRFeatureExtractor()(
        resampled(samples, 24_000, 16_000), sampling_rate=16_000, padding="longest", return_attention_mask=True
    )
    frames = int(features["attention_mask"].sum())
    rest = frames % 100
    tokens = frames // 100 * 13 + (((rest + 1) // 2 + 1) // 2 + 1) // 2
    text = "<|audio_start|>" + "<|audio_pad|>" * tokens + "<|audio_end|>"
    text += "".join(f"{word}<timestamp><timestamp>" for word in spoken)
    ids = torch.tensor([Qwen2Tokenizer.from_pretrained(folder).encode(text)])
    with torch.no_grad():
        logits = model(
            input_ids=ids, input_features=features["input_features"], input_features_mask=features["attention_mask"]
        ).logits[0]
    bins = logits[ids[0] == 151705].argmax(-1).numpy()
    expected = np.clip(np.maximum.accumulate(np.array(_fix_timestamps(bins * 80.0))) / 1000, 0, len(samples) / 24_000)
    found = aligner.align(spoken, samples)
    assert [word.word for word in found] == spoken
    np.testing.assert_allclose([t for word in found for t in (word.start_s, word.end_s)], expected, atol=1e-3)


def test_another_kind_of_checkpoint_is_named(voices):
    with pytest.raises(OptionsError, match="is no forced aligner"):
        load_aligner(voices)


# --- the stage --------------------------------------------------------------------------------------------------------
def test_the_aligner_gets_all_the_audio_and_begins_with_the_last_of_it(words, recorded):
    run = opened(words)
    parts = [np.full(3, i, np.float32) for i in range(4)]
    for part in parts[:-1]:
        assert words.feed(run, part, False)
        assert not words.has_work and not recorded.asked
    assert words.feed(run, parts[-1], True)
    output, end = done(words)
    assert isinstance(output, EngineOutput) and isinstance(end, EngineFinished)
    assert output.piece == WordsPiece((WordTime("one", 0.0, 0.1), WordTime("two", 0.1, 0.2)))
    np.testing.assert_array_equal(recorded.asked[0][1], np.concatenate(parts))


def test_a_text_without_words_and_speech_without_audio_have_none(words, recorded):
    for text, samples in (("... !", np.ones(9, np.float32)), ("one", np.zeros(0, np.float32))):
        words.feed(opened(words, text), samples, True)
        output, _ = done(words)
        assert output.piece == WordsPiece(())
    assert not recorded.asked


def test_a_failure_is_of_its_run_alone(words, recorded):
    recorded.error = RuntimeError("out of memory")
    words.feed(opened(words), np.ones(9, np.float32), True)
    (failed,) = done(words)
    assert (
        isinstance(failed, EngineFailed) and failed.error.line() == "[stage_failed:aligner] RuntimeError: out of memory"
    )
    recorded.error = None
    words.feed(opened(words), np.ones(9, np.float32), True)
    assert isinstance(done(words)[1], EngineFinished)


def test_a_slow_run_holds_up_no_other_ones_audio(words, recorded):
    """While one is aligned, the stage takes the audio of others, and has no work of its own."""
    recorded.may_go_on.clear()
    first, second = opened(words), opened(words)
    words.feed(first, np.ones(9, np.float32), True)
    assert recorded.begun.wait(PATIENCE_S)
    for _ in range(100):
        assert words.feed(second, np.ones(1920, np.float32), False)
    assert not words.has_work and words.step() == []
    recorded.may_go_on.set()
    assert done(words)[0].run is first
    words.feed(second, np.zeros(0, np.float32), True)
    assert done(words)[0].run is second


def test_a_run_that_is_stopped_meanwhile_says_nothing(words, recorded):
    recorded.may_go_on.clear()
    run = opened(words)
    words.feed(run, np.ones(9, np.float32), True)
    assert recorded.begun.wait(PATIENCE_S)
    words.stop(run)
    recorded.may_go_on.set()
    assert words.woken.wait(PATIENCE_S)
    assert not words.has_work and words.step() == []


def test_speech_that_is_too_long_gets_no_times_and_takes_no_memory(recorded):
    engine = WokenEngine(recorded, 1.0)
    run = opened(engine)
    for _ in range(20):
        engine.feed(run, np.ones(2400, np.float32), False)
        assert sum(map(len, run.state.chunks)) <= 24_000
    engine.feed(run, np.zeros(0, np.float32), True)
    (failed,) = done(engine)
    assert isinstance(failed, EngineFailed)
    assert "at most 1 s to get times of words (got 2.0 s)" in failed.error.message
    engine.close()


# --- the pipeline -----------------------------------------------------------------------------------------------------
def test_the_aligner_is_opened_for_words_alone():
    plain = PIPELINE.plan(GenerateRequest(operation="speech", input="x"))
    timed = PIPELINE.plan(GenerateRequest(operation="speech", input="x", modalities=("audio", "words")))
    assert plain.needed == {"talker", "code2wav"} and timed.needed == plain.needed | {"aligner"}


@pytest.mark.parametrize(
    ("language", "model", "message"),
    [("en", "", "this deployment has no aligner"), ("ja", "x", "not made for japanese"), ("Korean", "x", "korean")],
)
def test_words_that_cannot_be_timed_are_refused_before_admission(language, model, message):
    given = GenerateRequest(
        operation="speech", input="x", modalities=("audio", "words"), speech=SpeechParams(language=language)
    )
    with pytest.raises(BadRequest, match=message) as caught:
        check_request(PIPELINE, given, {}, {"talker": {"model": "none"}, "aligner": {"model": model}})
    assert caught.value.where == "modalities"


def test_samples_of_the_aligner_are_those_of_the_client(voices, recorded):
    """Two runs at once, in chunks of one frame; what the aligner gets is what the client gets, after all of it."""
    engines = {
        "code2wav": stage("code2wav", voices, chunks={"first_chunk_frames": 1, "chunk_frames": 1}),
        "aligner": WokenEngine(recorded, 180.0),
    }
    chain = Chain(PIPELINE, engines)
    try:
        jobs = [chain.open(request(speech)) for speech in (SPOKEN[0], SPOKEN[1])]
        for job, frames in zip(jobs, (12, 7), strict=True):
            codes = np.random.default_rng(frames).integers(0, 2048, (frames, 16), dtype=np.int16)
            chunk = Chunk(job.runs["code2wav"].id, "talker", tensors=(Tensor.of("codes", codes),))
            assert engines["code2wav"].feed(job.runs["code2wav"], chunk, True)
        while not all(job.over("code2wav") for job in jobs):
            chain.turn()
        while not all(job.over("aligner") for job in jobs):
            chain.turn()
            assert engines["aligner"].woken.wait(PATIENCE_S)
            engines["aligner"].woken.clear()
            chain.turn("aligner")
    finally:
        chain.close()
    by_words = dict(recorded.asked)
    assert len(by_words) == 2
    for job, speech in zip(jobs, (SPOKEN[0], SPOKEN[1]), strict=True):
        np.testing.assert_array_equal(by_words[tuple(recorded.words(speech.text))], job.audio())
        last_audio = max(i for i, event in enumerate(job.order) if event == ("code2wav", "EngineOutput"))
        assert job.order.index(("aligner", "EngineOutput")) > last_audio
