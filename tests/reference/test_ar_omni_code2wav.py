# SPDX-License-Identifier: Apache-2.0
"""code2wav against transformers' network on the same codes: chunked, batched, ragged; and the whole chain to audio."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.kit.ar_worker import become_ar_worker
from tests.kit.engine_chain import Chain
from tests.kit.gpu_devices import HAS_GPU
from tests.kit.host_graphs import HostRecorder
from tests.kit.omni_chats import CHATS, check, code2wav, engines, references, request
from tests.kit.tiny_omni import Reference, tiny_omni
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import EngineFinished, EngineOutput, Run
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE

become_ar_worker()
pytestmark = pytest.mark.timeout(240)

CLOSE = 1e-6
SAMPLES_PER_FRAME, TAIL = 1920, 555


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_omni(tmp_path_factory.mktemp("tiny_omni"))


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


def random_codes(frames, seed=0):
    return np.random.default_rng(seed).integers(0, 128, (frames, 4), dtype=np.int16)


def whole(reference, codes):
    import torch

    with torch.no_grad():
        return reference.model.code2wav(torch.from_numpy(codes.T.astype(np.int64))[None])[0, 0].numpy()


def decode(engine, many, pieces=1):
    """Audio of several runs at once; every turn brings `pieces` frames of each."""
    runs = [Run(os.urandom(16), "r", GenerateRequest(), upstream=frozenset({"talker"})) for _ in many]
    audio = {run: [] for run in runs}
    ends = {}
    for run in runs:
        engine.open(run)
    for at in range(0, max(map(len, many)) + pieces, pieces):
        for run, codes in zip(runs, many, strict=True):
            part = codes[at : at + pieces]
            if len(part):
                chunk = Chunk(run.id, "talker", tensors=(Tensor.of("codes", part),))
                assert engine.feed(run, chunk, at + pieces >= len(codes))
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, EngineOutput):
                    audio[event.run].append(event.tensors[0].data)
                else:
                    ends[event.run] = event
    assert all(isinstance(ends[run], EngineFinished) for run in runs)
    return [audio[run] for run in runs]


def plan(frames):
    """How many frames each piece of audio holds: four, then twenty-five at a time, then what is left."""
    found, left = [], frames
    for size in [2, 4, 8, 16] + [25] * frames:
        if left:
            found.append(min(size, left))
            left -= found[-1]
    return found


@pytest.mark.parametrize("frames", [1, 3, 4, 5, 29, 30, 54, 100])
def test_chunks_join_to_the_whole(folder, reference, frames):
    codes = random_codes(frames)
    pieces = decode(code2wav(folder), [codes])[0]
    expected = whole(reference, codes)
    assert len(expected) == frames * SAMPLES_PER_FRAME - TAIL
    joined = np.concatenate(pieces)
    assert len(joined) == len(expected)
    assert np.abs(joined - expected).max() < CLOSE
    assert [round((len(p) + TAIL * (i == 0)) / SAMPLES_PER_FRAME) for i, p in enumerate(pieces)] == plan(frames)


@pytest.mark.parametrize(("first", "later"), [(1, 1), (1, 2), (2, 3), (7, 10), (16, 16), (25, 40)])
def test_cutting_changes_nothing(folder, reference, first, later):
    """80 frames are five times the window of the tiny attention: its keys are dropped on the way."""
    codes = random_codes(80)
    engine = code2wav(folder, chunks={"first_chunk_frames": first, "chunk_frames": later})
    joined = np.concatenate(decode(engine, [codes])[0])
    assert np.abs(joined - whole(reference, codes)).max() < CLOSE


def test_each_frame_is_decoded_once(folder):
    """No context is decoded again: the network sees as many frames as there are."""
    engine = code2wav(folder)
    network = engine.decoder._network.network
    frames, embed = [], network.code_embedding.forward
    network.code_embedding.forward = lambda codes: frames.append(codes.shape[-1]) or embed(codes)
    decode(engine, [random_codes(80)])
    assert sum(frames) == 80


def test_rows_of_any_length_in_a_batch_equal_alone(folder):
    engine = code2wav(folder)
    many = [random_codes(frames, seed) for seed, frames in enumerate((1, 7, 33, 60, 4, 29))]
    together = decode(engine, many, pieces=3)
    for codes, audio in zip(many, together, strict=True):
        alone = decode(engine, [codes])[0]
        assert np.abs(np.concatenate(audio) - np.concatenate(alone)).max() < CLOSE


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
def test_a_graph_says_what_the_network_says(folder):
    """Any number of runs and any length: chunks that fit a graph and those that go without one."""
    import torch

    torch.backends.cudnn.allow_tf32 = False  # whose rounding depends on the batch
    many = [random_codes(frames, seed) for seed, frames in enumerate((1, 7, 33, 60, 4, 29))]
    plain = decode(code2wav(folder, device="cuda"), many)
    graphs = decode(code2wav(folder, device="cuda", cuda_graph_windows=[1, 4]), many)
    for expected, audio in zip(plain, graphs, strict=True):
        assert np.abs(np.concatenate(audio) - np.concatenate(expected)).max() < 1e-5


def captured_codec(folder, recorder):
    """The engine on a CPU, with graphs of the test kit for 1 and 4 runs."""
    engine = code2wav(folder)
    engine.decoder.capture([1, 4], engine.options.chunk_frames, recorder)
    return engine


def test_captured_steps_say_what_the_network_says(folder, caplog):
    """By a recorder on a CPU: states, lengths and the filling up of fewer runs are the ones of a GPU."""
    recorder = HostRecorder()
    engine = captured_codec(folder, recorder)
    assert not [record for record in caplog.records if record.name == "triton_omni.codec"]
    recorder.replays = 0
    many = [random_codes(frames, seed) for seed, frames in enumerate((1, 7, 83, 90, 4, 89))]
    audio = decode(engine, many)
    assert recorder.replays, "chunks of 25 frames are replayed"
    for expected, pieces in zip(decode(code2wav(folder), many), audio, strict=True):
        assert np.abs(np.concatenate(pieces) - np.concatenate(expected)).max() < CLOSE


@pytest.mark.parametrize("lie", ["stale", "frozen", "nan", "refuses"])
def test_captured_steps_that_lie_are_not_used(folder, lie, caplog):
    recorder = HostRecorder(lie)
    with caplog.at_level("WARNING"):
        engine = captured_codec(folder, recorder)
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "triton_omni.codec")
    assert warning.startswith("no capture here" if lie == "refuses" else "a captured step of 1 runs differs")
    assert warning.endswith(": the codec runs without CUDA graphs")
    recorder.replays = 0
    codes = random_codes(80)
    audio, expected = (np.concatenate(decode(each, [codes])[0]) for each in (engine, code2wav(folder)))
    assert np.abs(audio - expected).max() < CLOSE and not recorder.replays


def test_graphs_need_a_gpu(folder):
    with pytest.raises(ValueError, match="cuda_graph_windows needs device cuda"):
        code2wav(folder, cuda_graph_windows=[1])


def test_codes_outside_the_codebook_are_refused(folder):
    engine = code2wav(folder)
    run = Run(os.urandom(16), "r", GenerateRequest())
    engine.open(run)
    for bad in (128, -1):
        with pytest.raises(BadRequest):
            engine.feed(run, Chunk(run.id, "", tensors=(Tensor.of("codes", np.full((1, 4), bad, np.int16)),)), True)


def test_the_whole_chain_says_what_transformers_says(folder, reference):
    """Text, every code and the waveform, eight chats at once; audio begins while the text is still being written."""
    expected = references(reference)
    stages = engines(folder) | {"code2wav": code2wav(folder)}
    chain = Chain(PIPELINE, stages)
    try:
        jobs = [chain.open(request(place)) for place in range(len(CHATS))]
        chain.run()
    finally:
        chain.close()
    for job, spoken in zip(jobs, expected, strict=True):
        check(job, spoken)
        # where transformers leaves out the last frame, the audio up to its last samples is the same
        assert np.abs(job.audio()[: len(spoken.wave)] - spoken.wave).max() < 1e-5
    first_audio = jobs[2].order.index(("code2wav", "EngineOutput"))
    last_text = len(jobs[2].order) - 1 - jobs[2].order[::-1].index(("thinker", "EngineOutput"))
    assert first_audio < last_text
