# SPDX-License-Identifier: Apache-2.0
"""Requests for the tiny Qwen3-TTS checkpoints, and engines for its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.gpu_devices import BUILD
from tests.kit.tts_reference import FRAMES, Speech
from triton_omni.backends.core.engine import Engine
from triton_omni.backends.core.generate import GenerateRequest, Message, Part, Sampling, SpeechParams
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_tts.pipeline import PIPELINE

HELLO, FOX = "Hello there, this is a test.", "The quick brown fox jumps over the lazy dog, and goes on."
SPOKEN = [
    Speech(HELLO, "ryan", "english"),
    Speech(FOX, "dylan", instructions="speak slowly"),
    Speech(HELLO, "vivian", "chinese", "happy"),
    Speech(FOX, "eric", "chinese", text_per_frame=True),
    Speech("Grüße, 你好!", "serena", "german", text_per_frame=True),
    Speech("x", "sohee", "korean"),
]


TRANSCRIPT = "hello world this is"
RATE_HZ = 24_000


def recording(seconds: float = 2.3, seed: int = 3, rate_hz: int = RATE_HZ) -> np.ndarray:
    """A swelling tone in noise, float32."""
    samples = int(rate_hz * seconds)
    tone = 0.3 * np.sin(2 * np.pi * 220 * np.arange(samples) / rate_hz) * np.linspace(0, 1, samples)
    return (tone + 0.05 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def clone(speech: Speech, samples: np.ndarray, frames: int = FRAMES, rate_hz: int = RATE_HZ) -> GenerateRequest:
    """The request in the voice of a recording, which the tensor `audio` brings."""
    parts = [Part("audio", length=len(samples), sample_rate=rate_hz)]
    parts += [Part("text", speech.transcript)] if speech.transcript else []
    return request(speech, frames, messages=(Message("user", tuple(parts)),))


def stage(name: str, folder: Path, device: str = "cpu", **more: Any) -> Any:
    """The engine of a stage."""
    given: dict[str, Any] = {"model": str(folder)} | more
    return PIPELINE.stage(name).engine(EngineContext("qwen3_tts", name, given, device))


def talker(folder: Path, device: str = BUILD, **more: Any) -> Any:
    options = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8, "max_model_len": 512}
    return stage("talker", folder, device, **(options | more))


def engines(folder: Path, device: str = BUILD, **more: Any) -> dict[str, Engine]:
    return {"talker": talker(folder, device, **more), "code2wav": stage("code2wav", folder)}


def request(speech: Speech, frames: int = FRAMES, **more: Any) -> GenerateRequest:
    """Greedy, unless `more` says otherwise."""
    per_frame = speech.text_per_frame
    given: dict[str, Any] = {
        "operation": "speech",
        "input": speech.text,
        "speech": SpeechParams(speech.voice or None, speech.language, instructions=speech.instructions),
        "sampling": Sampling(temperature=0.0, max_tokens=frames),
        "stages": {} if per_frame is None else {"talker": {"text_per_frame": per_frame}},
    }
    return GenerateRequest(**(given | more))
