# SPDX-License-Identifier: Apache-2.0
"""Operation `completion`: a language model continues a text, without the chat template."""

from __future__ import annotations

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.pipeline import Operation

COMPLETION = "completion"


def completion_by(stage: str) -> Operation:
    """The operation of a pipeline whose stage `stage` continues texts."""
    return Operation(COMPLETION, stage, ("text",))


def prompt_field(request: GenerateRequest) -> str:
    """The field of a request that a language model reads."""
    return "input" if request.operation == COMPLETION else "messages"


def check_completion(request: GenerateRequest) -> None:
    """Raise BadRequest, naming the field, for a completion that no language model could make."""
    if not request.input:
        raise BadRequest("there is nothing to complete", "input")
    if request.messages:
        raise BadRequest("operation 'completion' continues 'input'; messages belong to operation 'chat'", "messages")
    if set(request.modalities) - {"text"}:
        raise BadRequest("operation 'completion' makes text only", "modalities")
    if request.tools:
        raise BadRequest("operation 'completion' calls no tools", "tools")
