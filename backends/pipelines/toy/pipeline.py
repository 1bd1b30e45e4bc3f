# SPDX-License-Identifier: Apache-2.0
"""Pipeline `toy`: three stages that compute next to nothing, for tests of everything around them."""

from __future__ import annotations

from triton_omni.backends.ar.completions import COMPLETION, check_completion, completion_by
from triton_omni.backends.core.chunk import TensorSpec
from triton_omni.backends.core.engine import Engine
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, stage_options
from triton_omni.backends.core.pipeline import Edge, EngineContext, Operation, Output, Pipeline, Stage
from triton_omni.backends.pipelines.toy import engines

VOICE = "sine"


_WORK = {"tokens": engines.tokens, "frames": engines.frames, "wave": engines.wave}


def _engine(context: EngineContext) -> Engine:
    if context.options:
        raise ValueError(f"the toy has no engine options, but got: {', '.join(context.options)}")
    return engines.ToyEngine(context.stage, _WORK[context.stage])


def check(request: GenerateRequest) -> None:
    """Refuse what the toy cannot do, naming the field."""
    speech = request.speech
    if speech.voice not in (None, VOICE):
        raise BadRequest(f"unknown voice '{speech.voice}'; available: {VOICE}", "speech.voice")
    if speech.language not in (None, "en"):
        raise BadRequest(f"unknown language '{speech.language}'; available: en", "speech.language")
    if request.operation == "speech" and not (request.input.strip() or request.open_input):
        raise BadRequest("there is nothing to speak", "input")
    if request.operation == COMPLETION:
        check_completion(request)
    if request.operation == "chat" and not request.messages:
        raise BadRequest("at least one message is needed", "messages")
    for stage, given in request.stages.items():
        if stage not in _WORK:
            raise BadRequest(f"unknown stage '{stage}'; stages: {', '.join(_WORK)}", f"stages.{stage}")
        stage_options(given, engines.Options, stage)


PIPELINE = Pipeline(
    name="toy",
    stages=(
        Stage("tokens", _engine),
        Stage("frames", _engine, outputs=(TensorSpec("frames", "float32", (-1, 8)),)),
        Stage(
            "wave",
            _engine,
            inputs=(TensorSpec("frames", "float32", (-1, 8)),),
            outputs=(TensorSpec("audio", "float32", (-1,)),),
            params=("speech.voice", "speech.language", "speech.speed"),
        ),
    ),
    edges=(Edge("tokens", "frames", engines.token_of), Edge("frames", "wave", engines.rows_of)),
    outputs=(Output("text", "tokens"), Output("audio", "wave")),
    operations=(
        Operation("chat", "tokens", ("text",)),
        Operation("speech", "frames", ("audio",), feed=engines.text_of),
        completion_by("tokens"),
    ),
    check=check,
    about={"voices": [VOICE], "languages": ["en"], "sample_rate": 24_000},
)
