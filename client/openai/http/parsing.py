# SPDX-License-Identifier: Apache-2.0
"""JSON values → body structs. The one place that turns msgspec's errors into OpenAI's `param` and `code`. Pure."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar, cast

import msgspec
from msgspec import inspect

from triton_omni.openai.http.errors import ApiError, invalid, missing, unsupported

Body = TypeVar("Body", bound=msgspec.Struct)
Values = dict[str, Any]
MAX_DEPTH = 100
"""Nested arrays and objects of a body; what handles the body further on is recursive."""
MAX_SHOWN_CHARS = 100
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_TYPE_ERROR = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_LENGTH_ERROR = re.compile(r"Expected `(\w+)` of length ([<>]=) (\d+)")
_BOOLEANS = {**dict.fromkeys(("true", "1", "yes", "on"), "true"), **dict.fromkeys(("false", "0", "no", "off"), "false")}
_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "a boolean", "array": "an array",
    "object": "an object", "null": "null",
}  # fmt: skip


def load_json(data: bytes) -> Values:
    """The JSON object of a body in UTF-8, UTF-16 or UTF-32. Raises ApiError if it is not one."""
    try:
        value = _loads(data.decode(json.detect_encoding(data)))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body cannot be read as JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return cast(Values, value)


def from_text(text: str, node: inspect.Type | None) -> object:
    """The value that a text of a form stands for: JSON, a boolean in any spelling of its declared type, or the text."""
    if any(isinstance(member, inspect.BoolType) for member in members(node)):
        text = _BOOLEANS.get(text.lower(), text)
    try:
        return _loads(text)
    except (ValueError, RecursionError):
        return text


def _loads(text: str) -> object:
    """The value. Refuses what Python reads and other JSON parsers do not: lone surrogates, NaN and infinity."""
    value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    level: list[object] = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            break
    else:
        raise ValueError(f"arrays and objects are nested more than {MAX_DEPTH} deep")
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return cast(object, value)


def _children(value: object) -> list[object]:
    """The arrays and objects directly inside one."""
    if isinstance(value, dict):
        value = cast(Values, value).values()
    return [item for item in cast(Iterable[object], value) if isinstance(item, dict | list)]


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:MAX_SHOWN_CHARS]} is not a finite number")
    return value


class Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of bodies and of their inner objects.

    ignored_fields  accepted because SDKs and frameworks send them; they mean nothing to this server
    refused_fields  known elsewhere and not supported here: name → what to say about it
    """

    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    refused_fields: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def prepare(cls, values: Values) -> None:
        """Complete what clients may leave out and the types need, such as the tag of a union."""


def parse_body(kind: type[Body], values: Values, ignored: list[str] | None = None) -> Body:
    """The body as a struct; `values` may be changed. Raises ApiError naming the parameter.

    Null counts as not sent, and so do unsupported fields that are off; whole floats count as integers. Other unknown
    fields are refused; where `ignored` is a list they are dropped and their names are added to it.
    """
    if issubclass(kind, Strict):
        kind.prepare(values)
    _clean(values, _type_info(kind), "", ignored)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _Fault(error, kind, values).api_error() from None


def _clean(value: object, node: inspect.Type | None, path: str, ignored: list[str] | None) -> object:
    """The value without what counts as not sent; it follows the declared types, so its depth is theirs."""
    for member in members(node):
        if isinstance(member, inspect.StructType) and isinstance(value, dict):
            fields = cast(Values, value)
            if member.tag_field is None or fields.get(member.tag_field) == member.tag:
                _clean_object(fields, member, path, ignored)
        elif isinstance(member, inspect.ListType) and isinstance(value, list):
            items = cast(list[object], value)
            items[:] = [_clean(item, member.item_type, f"{path}[{i}]", ignored) for i, item in enumerate(items)]
        elif isinstance(member, inspect.IntType) and isinstance(value, float) and value.is_integer():
            return int(value)
    return cast(object, value)


def _clean_object(value: Values, node: inspect.StructType, path: str, ignored: list[str] | None) -> None:
    fields = {field.encode_name: field for field in node.fields}
    known = node.cls if issubclass(node.cls, Strict) else None
    for name in list(value):
        if name in fields:
            value[name] = _clean(value[name], fields[name].type, f"{path}.{name}", ignored)
            if value[name] is None and not fields[name].required:
                del value[name]
        elif known is None:
            continue
        elif value[name] is None or name in known.ignored_fields:
            del value[name]
        elif name in known.refused_fields:
            if value[name] is False or value[name] == "":  # as clients write what they do not use
                del value[name]
        elif ignored is not None:
            ignored.append(f"{path}.{name}".removeprefix("."))
            del value[name]


class _Fault:
    """One validation error: what is wrong, where, and the value found there."""

    def __init__(self, error: msgspec.ValidationError, kind: type[msgspec.Struct], values: Values) -> None:
        text, _, path = str(error).rpartition(" - at `$")
        self.message = text or path  # an error about the whole value has no path
        self.steps = list(_steps(path.removesuffix("`"))) if text else []
        if path.endswith("[...]`") and len(self.steps) == 1:
            self.steps += _first_bad_key(kind, str(self.steps[0]), values, self.message)
        self.kind = kind
        self.values = values

    def api_error(self) -> ApiError:
        """The answer."""
        param = _joined(self.steps)
        if (name := self._quoted("Object contains unknown field `")) is not None:
            return self._unknown_field(name)
        if (name := self._quoted("Object missing required field `")) is not None:
            return missing(_joined([*self.steps, name]))
        if match := _TYPE_ERROR.match(self.message):
            if match[2] == "null" and not isinstance(self.steps[-1:], int) and not param.endswith("]"):
                return missing(param)
            expected = " or ".join(_WORDS.get(name, name) for name in match[1].split(" | ") if name != "null")
            return invalid(
                param, f"'{param}' must be {expected}, not {_WORDS.get(match[2], match[2])}.", "invalid_type"
            )
        if self.message.startswith("Invalid "):
            return self._not_a_choice(param)
        if match := _LENGTH_ERROR.match(self.message):
            return invalid(param, self._length(param, match))
        return invalid(param, self._range(param))

    # ---
    def _quoted(self, start: str) -> str | None:
        return self.message[len(start) : -1] if self.message.startswith(start) else None

    def _unknown_field(self, name: str) -> ApiError:
        param = _joined([*self.steps, name])
        owner = _type_at(self.kind, self.steps)
        names: list[str] = []
        for struct in (member for member in members(owner) if isinstance(member, inspect.StructType)):
            names += [field.encode_name for field in struct.fields]
            if issubclass(struct.cls, Strict) and (reason := struct.cls.refused_fields.get(name)):
                return unsupported(param, f"'{param}' {reason}")
        near = difflib.get_close_matches(name[:MAX_SHOWN_CHARS], sorted(names), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        return invalid(param, f"Unknown parameter: '{param}'{hint}", "unknown_parameter")

    def _not_a_choice(self, param: str) -> ApiError:
        found = _choices(_type_at(self.kind, self.steps)) or _tags(_type_at(self.kind, self.steps[:-1]))
        choices = ", ".join(repr(choice) for choice in found)
        message = f"Invalid value for '{param}': {self._shown()}. Supported values are: {choices}."
        return unsupported(param, message)

    def _length(self, param: str, match: re.Match[str]) -> str:
        value = _value_at(self.values, self.steps)
        unit = "characters" if match[1] == "str" else "entries"
        bound = "at most" if match[2] == "<=" else "at least"
        return f"'{param}' must have {bound} {match[3]} {unit} (got {len(value) if hasattr(value, '__len__') else 0})."

    def _range(self, param: str) -> str:
        found = _type_at(self.kind, self.steps)
        if not isinstance(found, inspect.IntType | inspect.FloatType):
            return f"'{param}' is not valid: {self.message}."
        if found.ge is not None and found.le is not None:
            bounds = f"from {found.ge:.17g} to {found.le:.17g}" if isinstance(found.ge, float) else None
            bounds = bounds or f"from {found.ge} to {found.le}"
        else:
            bounds = (
                f"greater than {found.gt} and at most {found.le}" if found.gt is not None else f"at least {found.ge}"
            )
        return f"'{param}' must be {bounds}, not {self._shown()}."

    def _shown(self) -> str:
        return repr(_value_at(self.values, self.steps))[:MAX_SHOWN_CHARS]


Step = str | int


def _steps(path: str) -> Iterator[Step]:
    for name, index in _STEP.findall(path):
        yield name or int(index)


def _joined(steps: list[Step]) -> str:
    """The steps as OpenAI writes them: messages[0].content."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _value_at(value: Any, steps: list[Step]) -> Any:
    try:
        for step in steps:
            value = value[step]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def _first_bad_key(kind: type[msgspec.Struct], name: str, values: Values, message: str) -> list[Step]:
    """The key of a mapping whose value has the error: msgspec's path does not name it."""
    field_type = next(field.type for field in msgspec.structs.fields(kind) if field.encode_name == name)
    for key in values[name]:
        try:
            msgspec.convert({key: values[name][key]}, field_type)
        except msgspec.ValidationError as error:
            if str(error).startswith(message):
                return [key]
    return []


@functools.cache
def _type_info(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _type_at(kind: type[msgspec.Struct], steps: list[Step]) -> inspect.Type | None:
    """The declared type at a place; of a union the first member that fits, None where there is none."""
    node: inspect.Type | None = _type_info(kind)
    for step in steps:
        node = next((inner for member in members(node) if (inner := _inner(member, step)) is not None), None)
    found = [member for member in members(node) if not isinstance(member, inspect.NoneType)]
    return node if isinstance(node, inspect.UnionType) and len(found) > 1 else found[0] if found else None


def members(node: inspect.Type | None) -> tuple[inspect.Type, ...]:
    """The types that a field may have; none for None."""
    if node is None:
        return ()
    if isinstance(node, inspect.Metadata):
        return members(node.type)
    return node.types if isinstance(node, inspect.UnionType) else (node,)


def _inner(node: inspect.Type, step: Step) -> inspect.Type | None:
    if isinstance(node, inspect.StructType):
        return next((field.type for field in node.fields if field.encode_name == step), None)
    if isinstance(node, inspect.ListType | inspect.VarTupleType):
        return node.item_type
    return node.value_type if isinstance(node, inspect.DictType) else None


def _choices(node: inspect.Type | None) -> list[str | int | bool | None]:
    return [value for member in members(node) if isinstance(member, inspect.LiteralType) for value in member.values]


def _tags(node: inspect.Type | None) -> list[str | int | None]:
    """What the tag of a union of structs may be."""
    return [member.tag for member in members(node) if isinstance(member, inspect.StructType)]
