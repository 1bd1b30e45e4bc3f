# SPDX-License-Identifier: Apache-2.0
"""POST /v1/images/edits: pictures from pictures, a description and perhaps a mask. The body is a form."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response

from triton_omni.backends.wire import Part
from triton_omni.media import Media
from triton_omni.openai.endpoints.image_request import Sources, read_draw
from triton_omni.openai.endpoints.images import answer
from triton_omni.openai.endpoints.messages import blaming
from triton_omni.openai.http.calls import shared_of
from triton_omni.openai.http.errors import invalid, missing
from triton_omni.openai.http.forms import fields_of, file_in, opened_form
from triton_omni.openai.http.pools import in_thread

MAX_PICTURES = 16
PICTURES = ("image", "image[]")


async def edit(request: Request) -> Response:
    """Edit."""
    async with opened_form(request) as form:
        sources = await _sources(form, Media(request.state.share.take), shared_of(request).pools.media)
        fields = fields_of(form, (*PICTURES, "mask"))
    fields.choice("input_fidelity", ("high", "low"))
    call = read_draw(fields, sources)
    return await answer(request, call)


async def _sources(form: FormData, found: Media, pool: ThreadPoolExecutor) -> Sources:
    """Pictures, then the mask of the first one."""
    pictures = [value for key in PICTURES for value in form.getlist(key)]
    if not pictures:
        raise missing("image")
    if len(pictures) > MAX_PICTURES:
        raise invalid("image", f"There may be {MAX_PICTURES} pictures, not {len(pictures)}.")
    parts = [await _part(pool, value, "image", partial(found.image, alpha="drop")) for value in pictures]
    if len(form.getlist("mask")) > 1:
        raise invalid("mask", "There is one mask at most.")
    if "mask" in form:
        mask = await _part(pool, form["mask"], "mask", found.mask)
        if mask.shape != parts[0].shape[:2]:
            sizes = [f"{width}x{height}" for height, width in (mask.shape, parts[0].shape[:2])]
            raise invalid("mask", f"The mask is {sizes[0]}, the picture {sizes[1]}: they must have the same size.")
        parts.append(mask)
    params = {}
    for place, part in enumerate(parts):
        param = "image" if len(part.shape) == 3 else "mask"
        params |= {f"messages[0].content[{place}]{end}": param for end in ("", ".shape")}
    return Sources(tuple(parts), found.tensors, params)


async def _part(pool: ThreadPoolExecutor, value: UploadFile | str, param: str, add: Callable[[bytes], Part]) -> Part:
    data = await file_in(value, param)
    with blaming(param, "invalid_image"):
        return await in_thread(pool, add, data)
