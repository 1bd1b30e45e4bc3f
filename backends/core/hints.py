# SPDX-License-Identifier: Apache-2.0
"""What an error of msgspec is about: the place in the value, and the known key that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec


def blamed(error: msgspec.ValidationError) -> tuple[str, str]:
    """(message, path of the value it is about: "messages[0].role"; "" is the whole)."""
    message, _, path = str(error).partition(" - at `$")
    key = path.rstrip("`").lstrip(".")
    if not key and "unknown field" in message:  # msgspec names the key in the text, not in the path
        key = message.split("`")[1]
    return message, key


def nearest_key(message: str, known: Iterable[str]) -> str:
    """`; did you mean '…'?` for a message of msgspec about an unknown field with a near known key, else ""."""
    return nearest(message.split("`")[1], known) if "unknown field" in message else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean '…'?` if one of the known names is near, else ""."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def field_names(kind: type[msgspec.Struct]) -> list[str]:
    """Names of a struct's fields, and of those of the structs in it."""
    fields = msgspec.structs.fields(kind)
    inner = (field.type for field in fields if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct))
    return [field.name for field in fields] + [name for struct in inner for name in field_names(struct)]
