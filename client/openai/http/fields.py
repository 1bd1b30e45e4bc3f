# SPDX-License-Identifier: Apache-2.0
"""Reading a JSON object field by field, with OpenAI's errors naming the parameter. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from triton_omni.openai.http.errors import ApiError, invalid, missing

IGNORED = frozenset(
    {
        "metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "reasoning_effort", "verbosity", "prediction", "web_search_options", "moderation",
    }
)  # fmt: skip
"""Parameters that mean nothing to this server; accepted, because SDKs and frameworks send them."""


def parse_json(data: bytes) -> Fields:
    """The request's body. Raises ApiError if it is no JSON object."""
    try:
        value = _loaded(data.decode(json.detect_encoding(data)))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return Fields(value)


def from_text(text: str) -> Any:
    """The JSON value a text stands for, or else the text."""
    try:
        return _loaded(text)
    except (ValueError, RecursionError):
        return text


def _loaded(text: str) -> Any:
    """The value, if it can be sent on: half a surrogate pair and infinity are JSON for Python alone."""
    value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word[:100]} is no number")
    return value


class Fields:
    """A JSON object whose fields are taken one by one; what nobody took is refused in the end.

    A field that is null counts as not sent, as everywhere in OpenAI's API. Those of a form (`is_form`) are all text;
    one that must be something else is read as JSON.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", *, is_form: bool = False) -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._path = path
        self._is_form = is_form
        self._taken: set[str] = set()

    def name(self, key: str) -> str:
        """The parameter's full name, for errors."""
        return f"{self._path}.{key}" if self._path else key

    def has(self, key: str) -> bool:
        """True if the field was sent."""
        return key in self._values

    def take(self, key: str) -> Any:
        """The field as it is; None if it was not sent."""
        self._taken.add(key)
        return self._values.get(key)

    def text(self, key: str, *, most: int = 1 << 20, needed: bool = False) -> str | None:
        """A string field."""
        value = self._of(key, str, "a string", needed)
        if value is not None and len(value) > most:
            raise invalid(self.name(key), f"'{self.name(key)}' may have {most} characters, not {len(value)}.")
        return value

    def choice(self, key: str, choices: Collection[str], default: str | None = None) -> str | None:
        """A string field with few values."""
        value = self.text(key)
        if value is None:
            return default
        if value not in choices:
            known = ", ".join(repr(c) for c in choices)
            raise invalid(
                self.name(key), f"Invalid value for '{self.name(key)}': {value!r}. Supported values are: {known}.",
                "unsupported_value",
            )  # fmt: skip
        return value

    def flag(self, key: str) -> bool:
        """A boolean field, false by default."""
        return bool(self._of(key, bool, "a boolean"))

    def integer(self, key: str, low: int, high: int) -> int | None:
        """A whole number from low to high."""
        value = self._no_text(key)
        if value is None:
            return None
        if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
            raise self._wrong_type(key, "an integer")
        return int(self._within(key, value, low, high))

    def number(self, key: str, low: float, high: float) -> float | None:
        """A number from low to high."""
        value = self._no_text(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(key, "a number")
        return float(self._within(key, value, low, high))

    def items(self, key: str, *, needed: bool = False) -> list[Any] | None:
        """An array field."""
        return self._of(key, list, "an array", needed)

    def record(self, key: str) -> dict[str, Any] | None:
        """An object field as it is."""
        return self._of(key, dict, "an object")

    def inner(self, key: str) -> Fields | None:
        """An object field, to be read field by field."""
        value = self.record(key)
        return None if value is None else Fields(value, self.name(key))

    def nothing_else(self, ignored: Collection[str] = ()) -> None:
        """Refuse fields that nobody took: a typo must not pass silently."""
        for key in self._values:
            if key not in self._taken and key not in ignored:
                raise invalid(self.name(key), f"Unknown parameter: '{self.name(key)}'.", "unknown_parameter")

    # ---
    def _no_text(self, key: str) -> Any:
        """A field that must not be text."""
        value = self.take(key)
        return from_text(value) if self._is_form and isinstance(value, str) else value

    def _of(self, key: str, kind: type, words: str, needed: bool = False) -> Any:
        value = self.take(key) if kind is str else self._no_text(key)
        if value is None:
            if needed:
                raise missing(self.name(key))
            return None
        if not isinstance(value, kind):
            raise self._wrong_type(key, words)
        return value

    def _within(self, key: str, value: float, low: float, high: float) -> float:
        if not (low <= value <= high):
            raise invalid(self.name(key), f"'{self.name(key)}' must be from {low} to {high}, not {str(value)[:100]}.")
        return value

    def _wrong_type(self, key: str, words: str) -> ApiError:
        kind = type(self._values[key]).__name__
        return invalid(self.name(key), f"'{self.name(key)}' must be {words}, not {kind}.", "invalid_type")
