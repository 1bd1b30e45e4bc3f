# SPDX-License-Identifier: Apache-2.0
"""The audio stages of pipeline `chat` without a server: speak a text, transcribe audio. Needs the engines' packages."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.kit import engine_driver as drive
from triton_omni.backends.codec.engine import CodecEngine
from triton_omni.backends.config.paths import models_dir
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import EngineChunk, EngineOutput
from triton_omni.backends.core.generate import GenerateRequest, Message, Part, TranscriptionParams
from triton_omni.backends.core.outputs import TranscriptPiece, WordsPiece, WordTime
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.deploy.load import load_deploy
from triton_omni.backends.pipelines.chat import pipeline
from triton_omni.backends.pipelines.chat.code2wav import SAMPLE_RATE_HZ
from triton_omni.backends.pipelines.chat.talker import TalkerEngine
from triton_omni.backends.pipelines.chat.transcriber import TranscriberEngine


def engine_context(stage: str) -> EngineContext:
    deploy = load_deploy(Path(pipeline.__file__).with_name("deploy.yaml"), pipeline.PIPELINE).stages[stage]
    return EngineContext("chat", stage, deploy.engine, "cpu", str(models_dir()))


def speak(talker: TalkerEngine, code2wav: CodecEngine, text: str) -> np.ndarray:
    """The audio of a text, as operation `speech` makes it."""
    run = drive.new_run(GenerateRequest(operation="speech", input=text))
    chunks = [drive.codes_chunk(codes) for codes in drive.codes(drive.run_with(talker, run))]
    return drive.audio(drive.run_with(code2wav, drive.new_run(upstream={"talker"}), [*chunks, drive.codes_chunk(None)]))


def speak_timed(talker: TalkerEngine, code2wav: CodecEngine, text: str) -> tuple[np.ndarray, list[WordTime]]:
    """The audio of a text and when its words are said, as outputs `audio` and `words` of operation `speech`."""
    run = drive.new_run(GenerateRequest(operation="speech", input=text, modalities=("audio", "words")))
    sent = [event for event in drive.run_with(talker, run) if isinstance(event, EngineChunk)]
    chunks = [Chunk(run.id, talker.stage, tensors=event.tensors, piece=event.piece) for event in sent]
    sink = drive.new_run(upstream={talker.stage})
    events = drive.run_with(code2wav, sink, [*chunks, drive.codes_chunk(None)])
    pieces = [event.piece for event in events if isinstance(event, EngineOutput)]
    return drive.audio(events), [word for piece in pieces if isinstance(piece, WordsPiece) for word in piece.words]


def transcribe(transcriber: TranscriberEngine, clips: list[np.ndarray], rate_hz: int = SAMPLE_RATE_HZ) -> list[str]:
    """The transcript of each clip, all sent as the audio parts of one request."""
    offsets = np.cumsum([0, *map(len, clips)])
    parts = tuple(
        Part("audio", offset=int(offset), length=len(audio), sample_rate=rate_hz)
        for offset, audio in zip(offsets, clips, strict=False)
    )
    run = drive.new_run(
        GenerateRequest(messages=(Message("user", parts),)),
        inputs={"audio": Tensor.of("audio", np.concatenate(clips))},
    )
    events = drive.run_with(transcriber, run)
    drive.end(events)
    pieces = [event.piece for event in events if isinstance(event, EngineChunk)]
    sent = [piece for piece in pieces if isinstance(piece, TranscriptPiece)]
    assert [piece.part for piece in sent] == list(range(len(clips)))
    return [piece.text for piece in sent]


def segments(
    transcriber: TranscriberEngine, audio: np.ndarray, rate_hz: int = SAMPLE_RATE_HZ, words: bool = True
) -> list[TranscriptPiece]:
    """What operation `transcription` answers."""
    part = Part("audio", length=len(audio), sample_rate=rate_hz)
    request = GenerateRequest(
        operation="transcription",
        messages=(Message("user", (part,)),),
        transcription=TranscriptionParams(word_timestamps=words),
    )
    run = drive.new_run(request, inputs={"audio": Tensor.of("audio", audio)})
    run.wanted, run.feeds = frozenset({"transcript"}), False
    events = drive.run_with(transcriber, run)
    drive.end(events)
    pieces = [event.piece for event in events if isinstance(event, EngineOutput)]
    return [piece for piece in pieces if isinstance(piece, TranscriptPiece)]
