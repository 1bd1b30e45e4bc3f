# SPDX-License-Identifier: Apache-2.0
"""What a request wants drawn: its text, the pictures to edit, and the mask. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Part
from triton_omni.backends.diffusion.options import MAX_RATIO, Limits

MAX_PROMPT_CHARS = 32_000
SOURCE_MULTIPLE = 32
"""Pictures to edit are brought to sides of whole 32 pixels."""


class Description(NamedTuple):
    """The words, and slices of the request's `image` tensor: what is to be edited, and where."""

    text: str
    pictures: tuple[Part, ...] = ()
    mask: Part | None = None


def read_description(request: GenerateRequest, limits: Limits) -> Description:
    """`input`, or the text, pictures and mask of the last user message; raises BadRequest naming the field."""
    if request.operation == "image":
        found, field = Description(request.input), "input"
    else:
        found, field = _of_messages(request, limits), "messages"
    if not found.text.strip():
        raise BadRequest("a picture needs a description", field)
    if len(found.text) > MAX_PROMPT_CHARS:
        raise BadRequest(f"a description may have {MAX_PROMPT_CHARS} characters, not {len(found.text)}", field)
    return found


def source_size(shape: Sequence[int], pixels: int) -> tuple[int, int]:
    """(width, height) of about `pixels` with the proportions of a picture of this shape, as diffusers computes it."""
    ratio = shape[1] / shape[0]
    width = math.sqrt(pixels * ratio)
    return round(width / SOURCE_MULTIPLE) * SOURCE_MULTIPLE, round(width / ratio / SOURCE_MULTIPLE) * SOURCE_MULTIPLE


def _of_messages(request: GenerateRequest, limits: Limits) -> Description:
    places = [i for i, message in enumerate(request.messages) if message.role == "user"]
    if not places:
        raise BadRequest("there is no user message to draw", "messages")
    parts = request.messages[places[-1]].parts
    pictures, mask = _pictures(parts, f"messages[{places[-1]}]", limits)
    if request.operation == "edit" and not pictures:
        raise BadRequest("an edit needs a picture", "messages")
    return Description("".join(part.text for part in parts), pictures, mask)


def _pictures(parts: Sequence[Part], field: str, limits: Limits) -> tuple[tuple[Part, ...], Part | None]:
    """Pictures, and the mask if there is one: a part of type "image" with rows and columns only."""
    pictures: list[Part] = []
    mask: Part | None = None
    for place, part in enumerate(parts):
        at = f"{field}.content[{place}]"
        if part.type == "text":
            continue
        if part.type != "image":
            raise BadRequest(f"this model draws from text and pictures, not from {part.type}", at)
        if not limits.max_pictures:
            raise BadRequest("this model draws from text only; it does not edit pictures", at)
        if len(part.shape) == 2 and mask is None:
            _check_mask(part, pictures, limits, at)
            mask = part
        else:
            _check_picture(part, f"{at}.shape")
            pictures.append(part)
            if len(pictures) > limits.max_pictures:
                raise BadRequest(f"this model takes {limits.max_pictures} at a time", at)
    return tuple(pictures), mask


def _check_mask(part: Part, pictures: Sequence[Part], limits: Limits, at: str) -> None:
    if not limits.masks:
        raise BadRequest("this model edits whole pictures; it takes no mask", at)
    if not pictures or part.shape != pictures[0].shape[:2]:
        raise BadRequest("a mask follows its picture and has its height and width", f"{at}.shape")


def _check_picture(part: Part, field: str) -> None:
    """The shape is height, width, 3, and neither side is so short that nothing is left of it."""
    if len(part.shape) != 3 or part.shape[-1] != 3 or min(part.shape) < 1:
        raise BadRequest(f"must be height, width, 3, not {list(part.shape)}", field)
    height, width = part.shape[:2]
    if max(height, width) > MAX_RATIO * min(height, width):
        raise BadRequest(f"{width}x{height}: one side may be {MAX_RATIO} times the other", field)
