# SPDX-License-Identifier: Apache-2.0
"""What can be refused before any stage works."""

from __future__ import annotations

from collections.abc import Callable

from triton_omni.backends.ar.completions import COMPLETION, check_completion
from triton_omni.backends.core.audio import check_rate
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest


def check_messages(request: GenerateRequest) -> None:
    """Raise BadRequest, naming the field, for messages no deployment of this family can read."""
    if request.operation == COMPLETION:
        check_completion(request)
        return
    if not request.messages:
        raise BadRequest("at least one message is needed", "messages")
    _check_videos(request)
    for index, message in enumerate(request.messages):
        for part in message.parts:
            if part.type != "text" and message.role != "user":
                raise BadRequest(f"{part.type} belongs in a user's message", f"messages[{index}]")
            if part.sample_rate:
                check_rate(part.sample_rate, f"messages[{index}]")


def _check_videos(request: GenerateRequest) -> None:
    """The model's processor knows one rate per request, and audio parts that all belong to videos, or none of them."""
    rates: set[float] = set()
    for index, message in enumerate(request.messages):
        before = ""
        for part in message.parts:
            if part.in_video and (part.type != "audio" or before != "video"):
                raise BadRequest("in_video is for the audio part right after a video part", f"messages[{index}]")
            before = part.type
            rates |= {part.fps} if part.type == "video" else set()
    if len(rates) > 1:
        raise BadRequest("all videos of a request need the same fps", "messages")
    parts = [part for message in request.messages for part in message.parts]
    inside = [part.in_video for part in parts if part.type == "audio"]
    if any(inside) and not (all(inside) and len(inside) == sum(part.type == "video" for part in parts)):
        raise BadRequest("if one video has its audio, each must, and there may be no other audio", "messages")


def check_for(*stages: str) -> Callable[[GenerateRequest], None]:
    """The check of a pipeline of these stages; the voices are the checkpoint's and are checked by the talker."""

    def check(request: GenerateRequest) -> None:
        check_messages(request)
        for stage in request.stages:
            if stage not in stages:
                raise BadRequest(f"unknown stage '{stage}'; stages: {', '.join(stages)}", f"stages.{stage}")

    return check
