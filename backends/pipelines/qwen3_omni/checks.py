# SPDX-License-Identifier: Apache-2.0
"""What can be refused before any stage works."""

from __future__ import annotations

from backends.core.errors import BadRequest
from backends.core.generate import GenerateRequest


def check_messages(request: GenerateRequest) -> None:
    """Raise BadRequest, naming the field, for messages no deployment of this family can read."""
    if not request.messages:
        raise BadRequest("at least one message is needed", "messages")
    for place, message in enumerate(request.messages):
        for part in message.parts:
            if part.type != "text" and message.role != "user":
                raise BadRequest(f"{part.type} belongs in a user's message", f"messages[{place}]")


def check(request: GenerateRequest) -> None:
    """The pipeline's check; the voices are the checkpoint's and are checked by the talker."""
    check_messages(request)
    for stage in request.stages:
        if stage not in ("thinker", "talker", "code2wav"):
            raise BadRequest(f"unknown stage '{stage}'; stages: thinker, talker, code2wav", f"stages.{stage}")
