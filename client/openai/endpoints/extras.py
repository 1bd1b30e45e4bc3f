# SPDX-License-Identifier: Apache-2.0
"""Parameters that OpenAI does not have and this server does; SDK users send them as `extra_body`."""

from __future__ import annotations

from typing import Any

from triton_omni.backends.wire import Deadlines, SpeechParams
from triton_omni.openai.http.errors import invalid
from triton_omni.openai.http.fields import Fields


def sampling(fields: Fields) -> dict[str, Any]:
    """Sampling options: top_k, min_p, repetition_penalty, ignore_eos."""
    penalty = fields.number("repetition_penalty", 0, 2)
    if penalty == 0:
        raise invalid("repetition_penalty", "'repetition_penalty' must be greater than 0.")
    return {
        "top_k": fields.integer("top_k", -1, 1 << 30),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": penalty,
        "ignore_eos": fields.flag("ignore_eos"),
    }


def request(fields: Fields) -> dict[str, Any]:
    """Options of the request: priority, deadlines, stages."""
    stages = fields.record("stages") or {}
    for name, options in stages.items():
        if not isinstance(options, dict):
            raise invalid(f"stages.{name}", f"'stages.{name}' must be an object.", "invalid_type")
    return {
        "priority": fields.integer("priority", -100, 100) or 0,
        "deadlines": _deadlines(fields.inner("deadlines")),
        "stages": stages,
    }


def speech(fields: Fields, voice: str | None, instructions: str = "") -> SpeechParams:
    """How to speak: `speed` and `language` beside what OpenAI has."""
    language = fields.text("language", most=100)
    return SpeechParams(voice, language, fields.number("speed", 0.25, 4) or 1.0, instructions)


def _deadlines(fields: Fields | None) -> Deadlines:
    if fields is None:
        return Deadlines()
    deadlines = Deadlines(
        queue_s=fields.number("queue_s", 0, 1e6),
        first_output_s=fields.number("first_output_s", 0, 1e6),
        stall_s=fields.number("stall_s", 0, 1e6),
        total_s=fields.number("total_s", 0, 1e6),
    )
    fields.nothing_else()
    return deadlines
