# SPDX-License-Identifier: Apache-2.0
"""Pipeline `qwen3_tts`: voice → talker → code2wav → aligner. Audio streams out of code2wav; `voice` is for recordings
alone, `aligner` for the times of words."""

from __future__ import annotations

from collections.abc import Mapping

from triton_omni.backends.ar.environment import worker_environment
from triton_omni.backends.config.paths import engine_python
from triton_omni.backends.core.chunk import TensorSpec
from triton_omni.backends.core.engine import Engine
from triton_omni.backends.core.pipeline import Edge, EngineContext, Operation, Output, Pipeline, Stage
from triton_omni.backends.pipelines.qwen3_tts.adapters import samples_of, voice_input
from triton_omni.backends.pipelines.qwen3_tts.checks import LANGUAGE_CODES, check, check_checkpoint, check_words


def _environment(context: EngineContext) -> Mapping[str, str]:
    return worker_environment(context.options, context.device, engine_python().parent.parent)


def _voice(context: EngineContext) -> Engine:
    from triton_omni.backends.pipelines.qwen3_tts.voice import make_voice

    return make_voice(context)


def _talker(context: EngineContext) -> Engine:
    from triton_omni.backends.pipelines.qwen3_tts.talker import make_talker

    return make_talker(context)


def _code2wav(context: EngineContext) -> Engine:
    from triton_omni.backends.pipelines.qwen3_tts.code2wav import make_code2wav

    return make_code2wav(context)


def _aligner(context: EngineContext) -> Engine:
    from triton_omni.backends.pipelines.qwen3_tts.aligner import make_aligner

    return make_aligner(context)


AUDIO = TensorSpec("audio", "float32", (-1,))
CODES = TensorSpec("codes", "int16", (-1, -1))
CONTEXT = TensorSpec("context", "int16", (-1, -1))
VOICE = (TensorSpec("vector", "float32", (-1,)), TensorSpec("frames", "int16", (-1, -1)))
SPEECH = ("speech.voice", "speech.language", "speech.instructions")

PIPELINE = Pipeline(
    name="qwen3_tts",
    stages=(
        Stage("voice", _voice, _environment, inputs=(AUDIO,), outputs=VOICE, media="audio"),
        Stage("talker", _talker, _environment, outputs=(CONTEXT, CODES), params=SPEECH, check=check_checkpoint),
        Stage("code2wav", _code2wav, _environment, inputs=(CODES,), outputs=(AUDIO,)),
        Stage("aligner", _aligner, _environment, check=check_words),
    ),
    edges=(Edge("voice", "talker", voice_input), Edge("talker", "code2wav"), Edge("code2wav", "aligner", samples_of)),
    outputs=(Output("words", "aligner", optional=True), Output("audio", "code2wav")),
    operations=(Operation("speech", "talker", ("audio",)),),
    check=check,
    about={
        "sample_rate": 24_000,
        # those of the published checkpoint with voices; the talker knows the loaded one's
        "voices": ["serena", "vivian", "uncle_fu", "ryan", "aiden", "ono_anna", "sohee", "eric", "dylan"],
        "languages": list(LANGUAGE_CODES),
    },
)
