# SPDX-License-Identifier: Apache-2.0
"""What can be refused before any stage works."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from triton_omni.backends.ar.completions import COMPLETION, check_completion
from triton_omni.backends.config import paths
from triton_omni.backends.core.audio import check_rate
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest

DEFAULT_VOICE = "Ethan"  # transformers' default


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


def check_voice(request: GenerateRequest, engine: Mapping[str, object]) -> None:
    """The check of a talker: its checkpoint's voices, where that is a folder of this host (a hub's is checked by the
    talker when it opens)."""
    voices = voices_of(str(Path(paths.models_dir(), str(engine.get("model", "")))))
    if voices:
        named_voice(request.speech.voice or DEFAULT_VOICE, voices)


def named_voice(name: str, voices: Mapping[str, int]) -> int:
    """The code of a voice; raises BadRequest for one that the checkpoint has not."""
    if name.lower() not in voices:
        raise BadRequest(f"unknown voice '{name}'; available: {', '.join(sorted(voices))}", "speech.voice")
    return voices[name.lower()]


@cache
def voices_of(folder: str) -> Mapping[str, int]:
    """Voices of a checkpoint, in lower case; empty if its config cannot be read here."""
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        return {name.lower(): code for name, code in config["talker_config"]["speaker_id"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def check_for(*stages: str) -> Callable[[GenerateRequest], None]:
    """The check of a pipeline of these stages."""

    def check(request: GenerateRequest) -> None:
        check_messages(request)
        for stage in request.stages:
            if stage not in stages:
                raise BadRequest(f"unknown stage '{stage}'; stages: {', '.join(stages)}", f"stages.{stage}")

    return check
