# SPDX-License-Identifier: Apache-2.0
"""Talker, code2wav and transcriber keep the engine contract; runs side by side give the same bytes as one alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hibari", reason="the engine environment is needed")

from tests.kit import engine_driver as drive
from tests.kit.engine_contract import CHECKS, Subject, check_name
from triton_omni.backends.codec.engine import CodecEngine, CodecOptions
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import EngineChunk, EngineEvent, EngineFinished, EngineOutput, Run
from triton_omni.backends.core.generate import GenerateRequest, Message, Part
from triton_omni.backends.pipelines.chat.audio_windows import SAMPLE_RATE_HZ, WINDOW_SAMPLES
from triton_omni.backends.pipelines.chat.code2wav import BINS, HibariDecoder
from triton_omni.backends.pipelines.chat.rvq import BOOKS, CODES, COMPONENTS, ENTRIES, PITCH_BINS, Codebooks
from triton_omni.backends.pipelines.chat.talker import TalkerEngine
from triton_omni.backends.pipelines.chat.transcriber import TranscriberEngine
from triton_omni.backends.pipelines.chat.transcription import Segment, WindowTranscript
from triton_omni.backends.pipelines.chat.voice import Voice

VOICE = Voice()
AUDIO = np.linspace(-0.5, 0.5, 70 * SAMPLE_RATE_HZ, dtype=np.float32)


def codebooks() -> Codebooks:
    rng = np.random.default_rng(8)
    return Codebooks(
        mean=np.full(2 * BINS, -3, np.float32),
        basis=rng.standard_normal((COMPONENTS, 2 * BINS), np.float32) / np.float32(COMPONENTS),
        books=rng.standard_normal((BOOKS, ENTRIES, COMPONENTS), np.float32),
        pitch_hz=np.concatenate([[0], np.geomspace(80, 400, PITCH_BINS - 1)]).astype(np.float32),
    )


def codes(frames: int) -> Any:
    found = np.random.default_rng(frames).integers(0, PITCH_BINS, (frames, CODES)).astype(np.int16)
    return drive.codes_chunk(found)


def same(event: EngineEvent) -> Any:
    """Everything an event carries, as bytes."""
    if isinstance(event, EngineChunk | EngineOutput):
        return type(event).__name__, event.piece, [(t.spec, drive.array(t).tobytes()) for t in event.tensors]
    return (type(event).__name__, event.usage) if isinstance(event, EngineFinished) else repr(event)


class LevelTranscriber:
    """Says how loud a window of 30 s is."""

    def transcribe(self, samples: np.ndarray, timestamps: bool) -> WindowTranscript:
        window = samples[:WINDOW_SAMPLES]
        segment = Segment(text=f"{np.abs(window).max():.3f}", start_s=0.0, end_s=len(window) / SAMPLE_RATE_HZ)
        return WindowTranscript((segment,), 0, len(window))


@dataclass(frozen=True)
class AudioSubject(Subject):
    """A subject whose runs come with AUDIO."""

    def run(self, request: GenerateRequest | None = None) -> Run:
        run = Subject.run(self, request)
        return dataclasses.replace(run, inputs={"audio": Tensor.of("audio", AUDIO)})


def audio(*lengths: int) -> GenerateRequest:
    parts = tuple(Part("audio", length=length, sample_rate=SAMPLE_RATE_HZ) for length in lengths)
    return GenerateRequest(messages=(Message("user", parts),))


SUBJECTS = {
    "talker in a chat": Subject(
        lambda: TalkerEngine("talker", VOICE, codebooks()), GenerateRequest(), upstream="thinker",
        inputs=("Hello the", "re. How are", " you? ", "", "Fine", ""), same=same,
    ),
    "talker as entry": Subject(
        lambda: TalkerEngine("talker", VOICE, codebooks()),
        GenerateRequest("speech", input="Hello there. How are you? Fine."), same=same,
    ),
    "code2wav": Subject(
        lambda: CodecEngine("code2wav", HibariDecoder(codebooks()), CodecOptions()), GenerateRequest(),
        GenerateRequest(stages={"code2wav": {"chunk": 3}}), upstream="talker",
        inputs=(codes(30), codes(1), codes(70), drive.codes_chunk(None)), wanted=frozenset({"audio"}), feeds=False,
        same=same,
    ),
    "transcriber": AudioSubject(
        lambda: TranscriberEngine("transcriber", LevelTranscriber(), 200.0), audio(len(AUDIO), 5000),
        audio(len(AUDIO) + 1),
        same=lambda event: repr(event.piece) if isinstance(event, EngineChunk) else type(event).__name__,
    ),
}  # fmt: skip


@pytest.mark.bytes_exact
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=list(SUBJECTS))
def test_contract(subject: Subject, check) -> None:
    check(subject)
