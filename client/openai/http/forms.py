# SPDX-License-Identifier: Apache-2.0
"""Form bodies (multipart/form-data): files, and the other fields as a body struct."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from typing import TypeVar, cast

import msgspec
from msgspec import inspect
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from triton_omni.openai.http.errors import ApiError, invalid
from triton_omni.openai.http.parsing import Values, from_text, members, parse_body

Body = TypeVar("Body", bound=msgspec.Struct)
MAX_FIELDS = 100
MAX_FILES = 32
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{1,256}")
_INDEX = re.compile(r"\[\d*\]$")
"""What clients append to the name of an array."""
_INNER = re.compile(r"\[([^\[\]]+)\]")
_NESTED = re.compile(rf"[^\[\]]+(?:{_INNER.pattern})+")


@asynccontextmanager
async def opened_form(request: Request) -> AsyncGenerator[FormData]:
    """The body as a form. Raises ApiError for another kind of body."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError(400, "The body must be multipart/form-data.", code="invalid_form")
    parser = _Parser(_head(request.headers), request.stream(), max_files=MAX_FILES, max_fields=MAX_FIELDS)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, f"The form cannot be read: {error.message}", code="invalid_form") from None
    try:
        if not parser.has_ended:
            raise ApiError(400, "The form is incomplete: its closing boundary is missing.", code="invalid_form")
        yield form
    finally:
        await form.close()


def _head(headers: Headers) -> Headers:
    """The content type with nothing but its boundary: forms have no `charset`, and Python's codecs are not the
    client's to choose. Raises ApiError."""
    boundary = parse_options_header(headers["content-type"])[1].get(b"boundary", b"").decode("latin-1")
    if not _BOUNDARY.fullmatch(boundary):
        raise ApiError(400, "The form cannot be read: its Content-Type has no valid boundary.", code="invalid_form")
    return Headers({"content-type": f'multipart/form-data; boundary="{boundary}"'})


class _Parser(MultiPartParser):
    has_ended = False

    def on_end(self) -> None:
        self.has_ended = True


async def file_in(value: UploadFile | str, param: str) -> bytes:
    """The content of a file field. Raises ApiError if it is not a file."""
    if isinstance(value, str):
        raise invalid(param, f"'{param}' must be a file.", "invalid_type")
    return await value.read()


def parse_form(kind: type[Body], form: FormData, files: Collection[str], ignored: list[str] | None = None) -> Body:
    """The fields that are no `files` as a struct. Raises ApiError naming the parameter.

    SDKs write objects as JSON or as `stages[words][n]`, arrays as JSON, as `include[]`, as `include[0]` or by repeating
    a name. An empty field counts as not sent.
    """
    types = {field.encode_name: field.type for field in cast(inspect.StructType, inspect.type_info(kind)).fields}
    values: Values = {}
    for key, value in form.multi_items():
        if key in files or value == "":
            continue
        if isinstance(value, UploadFile):
            if key in types:
                raise invalid(key, f"'{key}' must not be a file.", "invalid_type")
            known = ", ".join(f"'{name}'" for name in files)
            raise invalid(key, f"Unknown parameter: '{key}'; files are: {known}.", "unknown_parameter")
        name = _INDEX.sub("", key)
        if _has(types.get(name), inspect.ListType):
            several = from_text(value, None) if value.startswith("[") else None
            entries = values.setdefault(name, [])
            if not isinstance(entries, list):
                raise _is_both(name)
            cast(list[object], entries).extend(cast(list[object], several) if isinstance(several, list) else [value])
        else:
            _set(values, key, value, types.get(key))
    try:
        return parse_body(kind, values, ignored)
    except ApiError as error:
        name, bracket, _ = (error.param or "").partition("[")
        if bracket and _has(types.get(name), inspect.ListType):
            error.param = f"{name}[]"
        raise


def _has(node: inspect.Type | None, *kinds: type[inspect.Type]) -> bool:
    """True if a field may be of one of these types."""
    return any(isinstance(member, kinds) for member in members(node))


def _set(values: Values, key: str, text: str, node: inspect.Type | None) -> None:
    path = [key.partition("[")[0], *_INNER.findall(key)] if _NESTED.fullmatch(key) else [key]
    target = values
    for step in path[:-1]:
        inner = target.setdefault(step, {})
        if not isinstance(inner, dict):
            raise _is_both(path[0])
        target = cast(Values, inner)
    if path[-1] in target:
        raise invalid(key, f"'{key}' is sent twice.")
    is_object = text.startswith("{") and _has(node, inspect.StructType)
    is_text = _has(node, inspect.StrType, inspect.LiteralType) and not is_object
    target[path[-1]] = text if is_text else from_text(text, node)


def _is_both(name: str) -> ApiError:
    return invalid(name, f"'{name}' is sent as a value and as an object.", "invalid_type")
