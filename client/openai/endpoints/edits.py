# SPDX-License-Identifier: Apache-2.0
"""POST /v1/images/edits: images from images, a description and perhaps a mask. The body is a form."""

from __future__ import annotations

import re
from functools import partial

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response

from triton_omni.media import Media
from triton_omni.openai.endpoints.image_request import EditSources, read_image_call
from triton_omni.openai.endpoints.images import image_response, wrong_model
from triton_omni.openai.endpoints.messages import media_errors
from triton_omni.openai.endpoints.schemas import EditBody
from triton_omni.openai.http.context import context_of
from triton_omni.openai.http.errors import ApiError, invalid, missing
from triton_omni.openai.http.forms import file_in, opened_form, parse_form
from triton_omni.openai.http.pools import Pools

MAX_IMAGES = 16
_IMAGE = re.compile(r"image(\[\d*\])?")
"""The field of an image, also of several, as forms number them."""


async def edit(request: Request) -> Response:
    """Edit images."""
    context = context_of(request)
    async with opened_form(request) as form:
        images, mask = await _files(form)
        body = parse_form(EditBody, form, ("image", *filter(_IMAGE.fullmatch, form), "mask"), context.ignored)
        context.check_model(body.model)
        try:
            await context.services.catalogue.check_media(body.model, "image", "image")
        except ApiError as error:
            if error.param != "image":
                raise
            raise await wrong_model(context, body.model, "edit", error) from error
    sources = await _sources(images, mask, Media(context.share.take), context.services.pools)
    return await image_response(context, read_image_call(body, sources))


async def _files(form: FormData) -> tuple[list[bytes], bytes | None]:
    """(images, mask) as they were sent. Raises ApiError."""
    images = [value for key, value in form.multi_items() if _IMAGE.fullmatch(key)]
    if not images:
        raise missing("image")
    if len(images) > MAX_IMAGES:
        raise invalid("image", f"At most {MAX_IMAGES} images can be edited together (got {len(images)}).")
    if len(form.getlist("mask")) > 1:
        raise invalid("mask", "There is one mask at most.")
    mask = await file_in(form["mask"], "mask") if "mask" in form else None
    return [await file_in(value, "image") for value in images], mask


async def _sources(images: list[bytes], mask: bytes | None, media: Media, pools: Pools) -> EditSources:
    """The images, then the mask of the first one."""
    with media_errors("image", "invalid_image"):
        parts = [await pools.decode(partial(media.image, alpha="drop"), image) for image in images]
    if mask is not None:
        with media_errors("mask", "invalid_image"):
            parts.append(await pools.decode(media.mask, mask))
        if parts[-1].shape != parts[0].shape[:2]:
            sizes = [f"{width}x{height}" for height, width in (parts[-1].shape, parts[0].shape[:2])]
            raise invalid("mask", f"The mask is {sizes[0]}, the image {sizes[1]}: they must have the same size.")
    params: dict[str, str] = {}
    for index, part in enumerate(parts):
        param = "image" if len(part.shape) == 3 else "mask"
        params |= {f"messages[0].content[{index}]{end}": param for end in ("", ".shape")}
    return EditSources(tuple(parts), media.tensors, params)
