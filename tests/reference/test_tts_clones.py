# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS in the voice of a recording: what stage `voice` makes of it, and the speech that comes of that."""

from __future__ import annotations

import gc
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.kit.ar_worker import become_ar_worker
from tests.kit.engine_chain import Chain
from tests.kit.tiny_tts import tiny_tts
from tests.kit.tts_reference import FRAMES, Speech, TtsReference
from tests.kit.tts_runs import FOX, HELLO, RATE_HZ, TRANSCRIPT, clone, engines, recording, stage
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.pipelines.qwen3_tts.adapters import VoiceInput
from triton_omni.backends.pipelines.qwen3_tts.pipeline import PIPELINE

become_ar_worker()
pytestmark = pytest.mark.timeout(240)
CLONES = [
    Speech(HELLO, language="english", transcript=TRANSCRIPT),
    Speech(HELLO, language="english"),
    Speech(FOX, transcript=TRANSCRIPT, text_per_frame=False),
    Speech("x", language="german", transcript="a b", text_per_frame=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_tts(tmp_path_factory.mktemp("tiny_tts"), "base")


@pytest.fixture(scope="module")
def chain(folder):
    chain = Chain(PIPELINE, {"voice": stage("voice", folder)} | engines(folder))
    yield chain
    chain.close()
    gc.collect()


def opened(chain, speech, samples, rate_hz=RATE_HZ):
    return chain.open(clone(speech, samples, rate_hz=rate_hz), {"audio": Tensor.of("audio", samples)})


def test_codes_of_a_recording_are_those_of_mimi(folder):
    """transformers' whole model on the same tensors, all 32 books, of which the talker knows 16."""
    import torch
    from safetensors.torch import load_file
    from transformers import MimiConfig, MimiModel

    file = folder / "speech_tokenizer"
    facts = json.loads((file / "config.json").read_text(encoding="utf-8"))["encoder_config"]
    facts["sliding_window"] = 8000  # everything before, as in the transformers that the model was trained with
    model: Any = MimiModel(MimiConfig(**{k: v for k, v in facts.items() if k != "model_type"})).eval()
    tensors = load_file(file / "model.safetensors")
    own = {name.removeprefix("encoder."): t for name, t in tensors.items() if name.startswith("encoder.")}
    assert not model.load_state_dict(own, strict=False).unexpected_keys
    reader = stage("voice", folder)._reader
    for seconds in (1.0, 2.3, 12.0):
        samples = recording(seconds)
        with torch.no_grad():
            codes = model.encode(torch.from_numpy(samples)[None, None], return_dict=True).audio_codes
        found = reader.codes(samples)
        assert codes.shape[1] == 32 and len(found) == -(-len(samples) // 1920)
        np.testing.assert_array_equal(found, codes[0, :16, : len(found)].T.numpy())


def test_clones_alone_and_together_equal_plain_torch(chain, folder):
    samples, reader = recording(), chain.engines["voice"]._reader
    vector, frames = reader.vector(samples), reader.codes(samples)
    model = TtsReference(folder)
    expected = [model.speak(c, FRAMES, vector, frames if c.transcript else None) for c in CLONES]
    for speech, codes in zip(CLONES, expected, strict=True):
        job = opened(chain, speech, samples)
        chain.run()
        np.testing.assert_array_equal(job.sent("talker", "codes"), codes)
        assert len(job.audio()) == len(codes) * 1920
    jobs = []
    for speech in CLONES:
        jobs.append(opened(chain, speech, samples))
        for _ in range(3):
            chain.turn()
    chain.run()
    for job, codes in zip(jobs, expected, strict=True):
        np.testing.assert_array_equal(job.sent("talker", "codes"), codes)


def test_the_audio_goes_on_from_the_recording(chain, folder):
    """It is the end of what the codec makes of the recording's frames and the new ones, all at once."""
    import torch

    from triton_omni.backends.pipelines.qwen3_tts.code2wav import load

    job = opened(chain, CLONES[0], recording())
    chain.run()
    context, codes = job.sent("talker", "context"), job.sent("talker", "codes")
    assert len(context) == 29
    with torch.no_grad():
        both = torch.from_numpy(np.concatenate([context, codes]).T.astype(np.int64))
        wave = load(str(folder), "").eval()(both[None])[0, 0].numpy()
        without = load(str(folder), "").eval()(torch.from_numpy(codes.T.astype(np.int64))[None])[0, 0].numpy()
    assert np.abs(job.audio() - wave[len(context) * 1920 :]).max() < 1e-6
    assert np.abs(job.audio() - without).max() > 1e-3
    assert job.end("code2wav").usage == {"audio_samples": len(codes) * 1920}


def test_another_rate_and_a_slice_of_the_tensor(chain):
    """48 kHz are resampled; the recording is a slice of the request's tensor."""
    samples = recording(rate_hz=48_000)
    job = opened(chain, CLONES[1], samples, rate_hz=48_000)
    chain.run()
    assert len(job.sent("talker", "codes")) == FRAMES - 1
    engine = chain.engines["voice"]
    assert len(job.sent("voice", "vector")) == 64 and not job.sent("voice", "frames").size
    padded = np.concatenate([np.ones(7, np.float32), recording(), np.ones(9, np.float32)])
    request = clone(CLONES[1], recording())
    part = msgspec.structs.replace(request.messages[0].parts[0], offset=7)
    message = msgspec.structs.replace(request.messages[0], content=(part,))
    request = msgspec.structs.replace(request, messages=(message,))
    job = chain.open(request, {"audio": Tensor.of("audio", padded)})
    chain.run()
    np.testing.assert_array_equal(job.sent("voice", "vector"), engine._reader.vector(recording()))


def test_voices_are_kept_by_content_and_within_the_bound(folder):
    engine = stage("voice", folder, cache_bytes=3000)
    made = []
    vector = engine._reader.vector
    engine._reader.vector = lambda samples: made.append(1) or vector(samples)

    def read(samples, speech):
        run = Run(b"0" * 16, "r", clone(speech, samples), {"audio": Tensor.of("audio", samples)})
        engine.open(run)
        return {tensor.name: tensor.data for tensor in engine.step()[0].tensors}

    first, again = read(recording(), CLONES[1]), read(recording(), CLONES[1])
    assert len(made) == 1 and list(first) == ["vector"]
    np.testing.assert_array_equal(first["vector"], again["vector"])
    with_codes = read(recording(), CLONES[0])
    assert len(made) == 1 and with_codes["frames"].shape == (29, 16)
    assert list(read(recording(), CLONES[1])) == ["vector"]
    for seed in range(20):
        read(recording(seed=seed + 10), CLONES[0])
        assert engine.cache.nbytes <= 3000
    read(recording(), CLONES[0])
    assert len(made) == 22, "the first voice was the least recently used"


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(RATE_HZ, np.float32), "the recording is silent"),
        (np.full(RATE_HZ, np.nan, np.float32), "samples must be between -1 and 1"),
        (np.full(RATE_HZ, np.inf, np.float32), "samples must be between -1 and 1"),
        (np.full(RATE_HZ, 100.0, np.float32), "samples must be between -1 and 1"),
    ],
)
def test_recordings_without_a_voice_are_refused(chain, samples, message):
    with pytest.raises(BadRequest, match=message) as caught:
        opened(chain, CLONES[1], samples)
    assert caught.value.where == "messages[0]"
    assert not any(engine.has_work for engine in chain.engines.values())


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (VoiceInput(np.zeros(63, np.float32), None), r"must be 64 finite numbers \(got shape \[63\]\)"),
        (VoiceInput(np.full(64, np.nan, np.float32), None), "finite"),
        (VoiceInput(np.zeros(64, np.float32), np.full((3, 16), 2048, np.int16)), "16 books of 0 to below 2048"),
        (VoiceInput(np.zeros(64, np.float32), np.zeros((3, 15), np.int16)), "16 books of 0 to below 2048"),
    ],
)
def test_what_another_voice_stage_would_send_fails_the_run_alone(chain, inputs, message):
    job = opened(chain, CLONES[0], recording())
    with pytest.raises(StageFailed, match=message) as caught:
        chain.engines["talker"].feed(job.runs["talker"], inputs, True)
    assert caught.value.where == "voice->talker"
    chain.stop(job)
    assert not any(engine.has_work for engine in chain.engines.values())


def test_an_edge_without_a_voice_fails_the_run(chain):
    job = opened(chain, CLONES[0], recording())
    with pytest.raises(StageFailed, match="the edge ended without a voice"):
        chain.engines["talker"].feed(job.runs["talker"], None, True)
    chain.stop(job)


def test_a_stopped_clone_leaves_nothing(chain):
    for turns in range(4):
        job = opened(chain, CLONES[0], recording())
        for _ in range(turns):
            chain.turn()
        chain.stop(job)
        assert not any(engine.has_work for engine in chain.engines.values())
