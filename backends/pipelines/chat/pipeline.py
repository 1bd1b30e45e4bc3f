# SPDX-License-Identifier: Apache-2.0
"""Pipeline `chat`: transcriber → thinker → talker → code2wav. Text streams out of the thinker, audio out of the last.

Read by the thin Triton stubs as well, so nothing heavy is imported outside the functions that make engines.
"""

from __future__ import annotations

from triton_omni.backends.ar.completions import completion_by
from triton_omni.backends.core.chunk import TensorSpec
from triton_omni.backends.core.engine import Engine
from triton_omni.backends.core.pipeline import Edge, EngineContext, Operation, Output, Pipeline, Stage
from triton_omni.backends.pipelines.chat.adapters import text_of, transcript_of
from triton_omni.backends.pipelines.chat.checks import LANGUAGES, VOICES, check, check_audio
from triton_omni.backends.pipelines.chat.thinker import thinker_engine, thinker_environment

SAMPLE_RATE_HZ = 24_000
AUDIO = TensorSpec("audio", "float32", (-1,))
CODES = TensorSpec("codes", "int16", (-1, 9))


def _transcriber(context: EngineContext) -> Engine:
    from triton_omni.backends.pipelines.chat.transcriber import transcriber_engine

    return transcriber_engine(context)


def _talker(context: EngineContext) -> Engine:
    from triton_omni.backends.pipelines.chat.talker import talker_engine

    return talker_engine(context)


def _code2wav(context: EngineContext) -> Engine:
    from triton_omni.backends.pipelines.chat.code2wav import code2wav_engine

    return code2wav_engine(context)


PIPELINE = Pipeline(
    name="chat",
    stages=(
        Stage(
            "transcriber", _transcriber, inputs=(AUDIO,), media="audio", params=("transcription",), check=check_audio
        ),
        Stage("thinker", thinker_engine, thinker_environment),
        Stage("talker", _talker, outputs=(CODES,), params=("speech.voice", "speech.language", "speech.speed")),
        Stage("code2wav", _code2wav, inputs=(CODES,), outputs=(AUDIO,)),
    ),
    edges=(
        Edge("transcriber", "thinker", transcript_of),
        Edge("thinker", "talker", text_of),
        Edge("talker", "code2wav"),
    ),
    outputs=(
        Output("transcript", "transcriber"),
        Output("text", "thinker"),
        Output("words", "code2wav", optional=True),
        Output("audio", "code2wav"),
    ),
    operations=(
        Operation("chat", "thinker", ("text",)),
        Operation("speech", "talker", ("audio",), feed=text_of),
        Operation("transcription", "transcriber", ("transcript",)),
        completion_by("thinker"),
    ),
    check=check,
    about={
        "voices": list(VOICES),
        "languages": list(LANGUAGES),
        "sample_rate": SAMPLE_RATE_HZ,
    },
)
