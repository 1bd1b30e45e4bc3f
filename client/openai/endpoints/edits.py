# SPDX-License-Identifier: Apache-2.0
"""POST /v1/images/edits: images from images, a description and perhaps a mask. The body is a form."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response

from triton_omni.backends.wire import Part
from triton_omni.media import Media
from triton_omni.openai.endpoints.image_request import UNSUPPORTED, EditSources, read_image_call
from triton_omni.openai.endpoints.images import image_response
from triton_omni.openai.endpoints.messages import media_errors
from triton_omni.openai.endpoints.schemas import EditBody
from triton_omni.openai.http.context import context_of
from triton_omni.openai.http.errors import invalid, missing
from triton_omni.openai.http.forms import file_in, opened_form, parse_form
from triton_omni.openai.http.pools import in_thread

MAX_IMAGES = 16
IMAGES = ("image", "image[]")


async def edit(request: Request) -> Response:
    """Edit images."""
    context = context_of(request)
    async with opened_form(request) as form:
        sources = await _sources(form, Media(context.share.take), context.services.pools.media)
        body = parse_form(EditBody, form, (*IMAGES, "mask"), UNSUPPORTED)
    return await image_response(context, read_image_call(body, sources))


async def _sources(form: FormData, media: Media, pool: ThreadPoolExecutor) -> EditSources:
    """The images, then the mask of the first one."""
    images = [value for key in IMAGES for value in form.getlist(key)]
    if not images:
        raise missing("image")
    if len(images) > MAX_IMAGES:
        raise invalid("image", f"At most {MAX_IMAGES} images can be edited together (got {len(images)}).")
    parts = [await _part(pool, value, "image", partial(media.image, alpha="drop")) for value in images]
    if len(form.getlist("mask")) > 1:
        raise invalid("mask", "There is one mask at most.")
    if "mask" in form:
        mask = await _part(pool, form["mask"], "mask", media.mask)
        if mask.shape != parts[0].shape[:2]:
            sizes = [f"{width}x{height}" for height, width in (mask.shape, parts[0].shape[:2])]
            raise invalid("mask", f"The mask is {sizes[0]}, the image {sizes[1]}: they must have the same size.")
        parts.append(mask)
    params: dict[str, str] = {}
    for index, part in enumerate(parts):
        param = "image" if len(part.shape) == 3 else "mask"
        params |= {f"messages[0].content[{index}]{end}": param for end in ("", ".shape")}
    return EditSources(tuple(parts), media.tensors, params)


async def _part(pool: ThreadPoolExecutor, value: UploadFile | str, param: str, add: Callable[[bytes], Part]) -> Part:
    data = await file_in(value, param)
    with media_errors(param, "invalid_image"):
        return await in_thread(pool, add, data)
