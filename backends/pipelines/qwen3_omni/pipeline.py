# SPDX-License-Identifier: Apache-2.0
"""Pipeline `qwen3_omni`: thinker → talker → code2wav. Text streams out of the first, audio out of the last."""

from __future__ import annotations

from collections.abc import Mapping

from triton_omni.backends.ar.completions import completion_by
from triton_omni.backends.ar.environment import worker_environment
from triton_omni.backends.config.paths import engine_python
from triton_omni.backends.core.chunk import TensorSpec
from triton_omni.backends.core.engine import Engine
from triton_omni.backends.core.pipeline import Edge, EngineContext, Operation, Output, Pipeline, Stage
from triton_omni.backends.pipelines.qwen3_omni.adapters import talker_input
from triton_omni.backends.pipelines.qwen3_omni.checks import check_for, check_voice


def _environment(context: EngineContext) -> Mapping[str, str]:
    return worker_environment(context.options, context.device, engine_python().parent.parent)


def _thinker(context: EngineContext) -> Engine:
    from triton_omni.backends.pipelines.qwen3_omni.thinker import make_thinker

    return make_thinker(context)


def _talker(context: EngineContext) -> Engine:
    from triton_omni.backends.pipelines.qwen3_omni.talker import make_talker

    return make_talker(context)


def _code2wav(context: EngineContext) -> Engine:
    from triton_omni.backends.pipelines.qwen3_omni.code2wav import make_code2wav

    return make_code2wav(context)


MEDIA = (
    TensorSpec("audio", "float32", (-1,)),
    TensorSpec("image", "uint8", (-1,)),
    TensorSpec("video", "uint8", (-1,)),
)
CODES = TensorSpec("codes", "int16", (-1, -1))

THINKER = Stage("thinker", _thinker, _environment, inputs=MEDIA)

PIPELINE = Pipeline(
    name="qwen3_omni",
    stages=(
        THINKER,
        Stage("talker", _talker, _environment, outputs=(CODES,), params=("speech.voice",), check=check_voice),
        Stage(
            "code2wav",
            _code2wav,
            _environment,
            inputs=(CODES,),
            outputs=(TensorSpec("audio", "float32", (-1,)),),
        ),
    ),
    edges=(Edge("thinker", "talker", talker_input), Edge("talker", "code2wav")),
    outputs=(Output("text", "thinker"), Output("audio", "code2wav")),
    operations=(Operation("chat", "thinker", ("text",)), completion_by("thinker")),
    check=check_for("thinker", "talker", "code2wav"),
    about={
        "sample_rate": 24_000,
        "voices": ["ethan", "chelsie", "aiden"],  # the published checkpoint's; the talker knows the loaded one's
    },
)
