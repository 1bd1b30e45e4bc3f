# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's talker and codec, live, against plain torch on the same tiny checkpoint: all codes of all frames."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tests.kit.ar_worker import become_ar_worker
from tests.kit.engine_chain import Chain
from tests.kit.gpu_devices import VLLM_DEVICES
from tests.kit.tiny_tts import tiny_tts
from tests.kit.tts_reference import FRAMES, Speech, TtsReference
from tests.kit.tts_runs import FOX, HELLO, SPOKEN, engines, request
from triton_omni.backends.core.engine import EngineChunk, EngineFinished
from triton_omni.backends.core.generate import Sampling
from triton_omni.backends.pipelines.qwen3_tts.pipeline import PIPELINE

become_ar_worker()
pytestmark = pytest.mark.timeout(240)
END = 2150


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_tts(tmp_path_factory.mktemp("tiny_tts"))


@pytest.fixture(scope="module")
def reference(folder):
    model = TtsReference(folder)
    return [model.speak(speech) for speech in SPOKEN]


@pytest.fixture(scope="module", params=VLLM_DEVICES)
def chain(request, folder):
    chain = Chain(PIPELINE, engines(folder, request.param))
    yield chain
    chain.close()
    gc.collect()


def codes_of(job):
    return job.sent("talker", "codes")


def test_alone_equals_plain_torch(chain, reference):
    for speech, codes in zip(SPOKEN, reference, strict=True):
        job = chain.open(request(speech))
        chain.run()
        np.testing.assert_array_equal(codes_of(job), codes)
        assert job.audio().shape == (len(codes) * 1920,) and np.abs(job.audio()).max() > 0.05
        assert job.end("talker").reason == "length" and len(codes) == FRAMES - 1


@pytest.mark.parametrize("apart", [0, 3, 7])
def test_together_and_joining_equals_plain_torch(chain, reference, apart):
    jobs = []
    for speech in SPOKEN:
        jobs.append(chain.open(request(speech)))
        for _ in range(apart):
            chain.turn()
    chain.run()
    for job, codes in zip(jobs, reference, strict=True):
        np.testing.assert_array_equal(codes_of(job), codes)


def test_the_first_frame_leaves_in_the_prefill_step(chain):
    job = chain.open(request(SPOKEN[1]))
    engine = chain.engines["talker"]
    events = engine.step()
    assert [type(event) for event in events] == [EngineChunk] and events[0].tensors[0].spec.shape == (1, 16)
    chain.stop(job)


def test_speech_ends_no_sooner_than_two_frames(chain):
    """The end is made the best code from the start on."""
    sampling = Sampling(temperature=0.0, max_tokens=FRAMES, logit_bias={str(END): 100.0})
    job = chain.open(request(SPOKEN[0], sampling=sampling))
    chain.run()
    assert len(codes_of(job)) == 2 and job.end("talker").reason == "stop"
    assert len(job.audio()) == 2 * 1920


def test_a_seed_says_the_same_alone_and_beside_others(chain):
    def drawn(seed):
        return request(SPOKEN[0], sampling=Sampling(seed=seed, max_tokens=FRAMES))

    alone = []
    for seed in range(3):
        job = chain.open(drawn(seed))
        chain.run()
        alone.append(codes_of(job))
    together = [chain.open(drawn(seed)) for seed in range(3)]
    chain.run()
    for job, codes in zip(together, alone, strict=True):
        np.testing.assert_array_equal(codes_of(job), codes)
    assert not np.array_equal(alone[0], alone[1])


def test_speech_that_never_ends_is_cut(chain):
    """400 frames, or 40 for each token of a longer text, whatever the request allows."""
    job = chain.open(request(Speech("x", "ryan"), sampling=Sampling(temperature=0.0, max_tokens=2000)))
    chain.run()
    assert job.end("talker").reason == "length" and len(codes_of(job)) == 399


@pytest.mark.parametrize("turns", [0, 1, 3, 12])
def test_stopped_at_any_time_everything_is_free_again(chain, reference, turns):
    job, other = chain.open(request(SPOKEN[0])), chain.open(request(SPOKEN[1]))
    for _ in range(turns):
        chain.turn()
    chain.stop(job)
    chain.run()
    np.testing.assert_array_equal(codes_of(other), reference[1])
    assert not chain.engines["talker"].gate.runs
    assert not any(engine.has_work for engine in chain.engines.values())


def test_prefill_in_pieces_and_preemption_change_nothing(folder, reference):
    """16 tokens a step, and a cache that cannot hold all runs."""
    step, cache = {"max_num_batched_tokens": 16}, {"block_size": 32, "vllm": {"num_gpu_blocks_override": 10}}
    chain = Chain(PIPELINE, engines(folder, max_model_len=192, **step, **cache))
    try:
        jobs = [chain.open(request(speech)) for speech in SPOKEN]
        chain.run()
    finally:
        chain.close()
        gc.collect()
    for job, codes in zip(jobs, reference, strict=True):
        np.testing.assert_array_equal(codes_of(job), codes)
    ends = [job.end("talker") for job in jobs]
    assert sum(end.usage["preemptions"] for end in ends if isinstance(end, EngineFinished)) > 0


def test_the_small_model_without_a_projection(tmp_path):
    folder = tiny_tts(tmp_path, size="0b6")
    model = TtsReference(folder)
    said = [Speech(HELLO, "ryan", "english"), Speech(FOX, "aiden", text_per_frame=True)]
    chain = Chain(PIPELINE, engines(folder))
    try:
        jobs = [chain.open(request(speech)) for speech in said]
        chain.run()
    finally:
        chain.close()
        gc.collect()
    for job, speech in zip(jobs, said, strict=True):
        np.testing.assert_array_equal(codes_of(job), model.speak(speech))
