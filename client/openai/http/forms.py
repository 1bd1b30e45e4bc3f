# SPDX-License-Identifier: Apache-2.0
"""Bodies that are forms (multipart/form-data): files, and other fields as if they had come as JSON."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from triton_omni.openai.http.errors import ApiError, invalid
from triton_omni.openai.http.fields import Fields, from_text

MAX_FIELDS = 100
MAX_FILES = 32
_INNER = re.compile(r"\[([^\[\]]+)\]")
_NESTED = re.compile(rf"[^\[\]]+(?:{_INNER.pattern})+")


@asynccontextmanager
async def opened_form(request: Request) -> AsyncIterator[FormData]:
    """The body as a form. Raises ApiError for another kind of body."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError(400, "The body must be multipart/form-data.", code="invalid_form")
    parser = _Parser(request.headers, request.stream(), max_files=MAX_FILES, max_fields=MAX_FIELDS)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, f"The form cannot be read: {error.message}", code="invalid_form") from None
    try:
        if not parser.has_ended:
            raise ApiError(400, "The form breaks off: its closing boundary is missing.", code="invalid_form")
        yield form
    finally:
        await form.close()


class _Parser(MultiPartParser):
    has_ended = False

    def on_end(self) -> None:
        self.has_ended = True


async def file_in(value: UploadFile | str, param: str) -> bytes:
    """The content of a file field. Raises ApiError if it is none."""
    if isinstance(value, str):
        raise invalid(param, f"'{param}' must be a file.", "invalid_type")
    return await value.read()


def fields_of(form: FormData, files: Collection[str]) -> Fields:
    """The fields that are no `files`. SDKs write objects as `stages[denoiser][steps]`, arrays as `include[]`."""
    values: dict[str, Any] = {}
    for key, value in form.multi_items():
        if key in files:
            continue
        if isinstance(value, UploadFile):
            raise invalid(key, f"'{key}' must not be a file.", "invalid_type")
        if key.endswith("[]"):
            values.setdefault(key, []).append(value)
        else:
            _set(values, key, value)
    return Fields(values, is_form=True)


def _set(values: dict[str, Any], key: str, value: str) -> None:
    path = [key.partition("[")[0], *_INNER.findall(key)] if _NESTED.fullmatch(key) else [key]
    target = values
    for step in path[:-1]:
        target = target.setdefault(step, {})
        if not isinstance(target, dict):
            raise invalid(path[0], f"'{path[0]}' is sent as a value and as an object.", "invalid_type")
    if path[-1] in target:
        raise invalid(key, f"'{key}' is sent twice.")
    target[path[-1]] = from_text(value) if len(path) > 1 else value
