# SPDX-License-Identifier: Apache-2.0
"""A request's messages and media → the prompt of the thinker, by the checkpoint's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from triton_omni.backends.ar.chat_prompts import ChatEncoder
from triton_omni.backends.ar.completions import COMPLETION
from triton_omni.backends.ar.engine import LlmPrompt
from triton_omni.backends.core.audio import check_samples, resampled
from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, Part
from triton_omni.backends.pipelines.qwen3_omni.checks import check_messages

if TYPE_CHECKING:
    from triton_omni.backends.ar.chat_prompts import ChatTokenizer

AUDIO_HZ = 16_000  # what the audio encoder was trained on


class OmniPromptBuilder:
    """triton_omni.backends.ar.engine.PromptBuilder of Qwen3-Omni."""

    def __init__(self, tokenizer: ChatTokenizer, template: str) -> None:
        self._chats = ChatEncoder(tokenizer, template)

    def check(self, run: Run) -> None:
        check_messages(run.request)

    def build(self, run: Run, transcripts: Sequence[str]) -> LlmPrompt:
        if run.request.operation == COMPLETION:
            return LlmPrompt(self._chats.encode_plain(run.request.input))
        chat = [_turn(message, f"messages[{index}]") for index, message in enumerate(run.request.messages)]
        tools = [dict(tool) for tool in run.request.tools] or None
        media: dict[str, list[object]] = {}
        for index, message in enumerate(run.request.messages):
            for part in message.parts:
                if part.type != "text":
                    media.setdefault(part.type, []).append(_item(run, part, f"messages[{index}]"))
        return LlmPrompt(self._chats.encode(chat, tools), media, _processor(run.request))


def _turn(message: Message, where: str) -> dict[str, object]:
    """One message as chat templates take it."""
    role = "system" if message.role == "developer" else message.role
    calls = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    turn: dict[str, object] = {"role": role, "content": _content(message)}
    return turn | ({"tool_calls": calls} if calls else {})


def _call(call: Mapping[str, Any], where: str) -> dict[str, object]:
    """An earlier call; templates want its arguments as an object."""
    try:
        function = call["function"]
        return {"type": "function", "function": function | {"arguments": json.loads(function["arguments"])}}
    except (KeyError, TypeError, ValueError, RecursionError):
        raise BadRequest(
            "a call needs a function with a name and arguments, the text of a JSON object", where
        ) from None


def _content(message: Message) -> str | list[dict[str, str]]:
    """The message's parts as templates take them; adjacent texts are one, so that no control string hides between."""
    if isinstance(message.content, str):
        return message.content
    parts: list[dict[str, str]] = []
    for part in message.parts:
        if part.in_video:  # the audio of a video has no place of its own
            continue
        if part.type != "text":
            parts.append({"type": part.type})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += part.text
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


def _processor(request: GenerateRequest) -> dict[str, object]:
    """Options of the processor; checks.check_messages has made sure that they are the same for all videos."""
    parts = [part for message in request.messages for part in message.parts]
    rates = [part.fps for part in parts if part.fps]
    options: dict[str, object] = {"fps": rates[0], "do_sample_frames": False} if rates else {}
    return options | ({"use_audio_in_video": True} if any(part.in_video for part in parts) else {})


def _item(run: Run, part: Part, where: str) -> Image.Image | np.ndarray | tuple[np.ndarray, int]:
    """One image, audio or video in the form vLLM's processor takes."""
    tensor = run.inputs.get(part.type)
    if tensor is None:
        raise BadRequest(f"the request has a {part.type} part but no tensor '{part.type}'", where)
    flat = np.frombuffer(tensor.data, tensor.spec.dtype)
    if part.offset + part.length > flat.size or not part.length:
        raise BadRequest(f"{part.type} part is not inside its tensor of {flat.size} elements", where)
    data = flat[part.offset : part.offset + part.length]
    if part.type == "audio":
        check_samples(data, where)
        return resampled(data, part.sample_rate or AUDIO_HZ, AUDIO_HZ), AUDIO_HZ
    dimensions = 3 if part.type == "image" else 4
    if len(part.shape) != dimensions or part.shape[-1] != 3 or int(np.prod(part.shape)) != part.length:
        raise BadRequest(f"a {part.type} part needs a shape of {dimensions} numbers that ends in 3", where)
    pixels = data.reshape(part.shape)
    return Image.fromarray(pixels) if part.type == "image" else pixels.copy()
