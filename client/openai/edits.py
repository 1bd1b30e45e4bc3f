# SPDX-License-Identifier: Apache-2.0
"""POST /v1/images/edits: pictures from pictures, a description and perhaps a mask. The body is a form."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response

from backends.wire import Part
from client.media import Media
from client.openai.errors import ApiError, invalid, missing
from client.openai.fields import Fields, from_text
from client.openai.images import Sources, answer, read_draw
from client.openai.messages import blaming

MAX_PICTURES = 16
MAX_FIELDS = 100
PICTURES = ("image", "image[]")
_INNER = re.compile(r"\[([^\[\]]+)\]")


async def edit(request: Request) -> Response:
    """Edit."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(400, "The body must be multipart/form-data.", code="invalid_form")
    async with request.form(max_files=MAX_PICTURES + 1, max_fields=MAX_FIELDS) as form:
        sources = await _sources(form)
        call = read_draw(_fields(form), sources)
    return await answer(request, call)


async def _sources(form: FormData) -> Sources:
    """Pictures, then the mask of the first one."""
    found = Media()
    parts = [await _part(value, "image", found.image) for key in PICTURES for value in form.getlist(key)]
    if not parts:
        raise missing("image")
    if "mask" in form:
        mask = await _part(form["mask"], "mask", found.mask)
        if mask.shape != parts[0].shape[:2]:
            sizes = [f"{width}x{height}" for height, width in (mask.shape, parts[0].shape[:2])]
            raise invalid("mask", f"The mask is {sizes[0]}, the picture {sizes[1]}: they must have the same size.")
        parts.append(mask)
    params = {}
    for place, part in enumerate(parts):
        param = "image" if len(part.shape) == 3 else "mask"
        params |= {f"messages[0].content[{place}]{end}": param for end in ("", ".shape")}
    return Sources(tuple(parts), found.tensors, params)


async def _part(value: UploadFile | str, param: str, add: Callable[[bytes], Part]) -> Part:
    if isinstance(value, str):
        raise invalid(param, f"'{param}' must be a file.", "invalid_type")
    data = await value.read()
    with blaming(param, "invalid_image"):
        return await asyncio.to_thread(add, data)


def _fields(form: FormData) -> Fields:
    """The other fields. `stages[denoiser][steps]` is how SDKs write an object in a form."""
    values: dict[str, Any] = {}
    for key, value in form.multi_items():
        if key in (*PICTURES, "mask"):
            continue
        if isinstance(value, UploadFile):
            raise invalid(key, f"'{key}' must not be a file.", "invalid_type")
        name, bracket, _ = key.partition("[")
        path = [name, *_INNER.findall(key)] if bracket else [name]
        target = values
        for step in path[:-1]:
            target = target.setdefault(step, {})
            if not isinstance(target, dict):
                raise invalid(name, f"'{name}' is sent as a value and as an object.", "invalid_type")
        if path[-1] in target:
            raise invalid(key, f"'{key}' is sent twice.")
        target[path[-1]] = from_text(value) if bracket else value
    fields = Fields(values, is_form=True)
    fields.choice("input_fidelity", ("high", "low"))
    return fields
