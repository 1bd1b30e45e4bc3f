# SPDX-License-Identifier: Apache-2.0
"""`python docs/wire_tables.py`: write the tables of docs/wire.md from the types that they describe.

A table stands between `<!-- table NAME -->` and `<!-- end -->`. A field's meaning is its line in the docstring of its
struct (`name  meaning`, further lines indented), a tensor's that in the docstring of `backends/wire.py`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import inspect as types

from triton_omni.backends import wire
from triton_omni.backends.core import errors, generate, outputs, responses
from triton_omni.backends.core.chunk import TensorSpec
from triton_omni.backends.core.pipeline import Stage
from triton_omni.backends.repository import PUBLIC_INPUTS, PUBLIC_OUTPUTS, TRITON_TYPES, stage_inputs

DOCUMENT = Path(__file__).with_name("wire.md")
STRUCTS: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind
    for kind in (
        *(generate.GenerateRequest, generate.Message, generate.Part, generate.Sampling, generate.Deadlines),
        *(generate.ImageParams, generate.SpeechParams, generate.TranscriptionParams),
        *(responses.Event, responses.Progress, responses.PipelineStatus, responses.StageStatus),
        *(responses.RequestStatus, responses.RequestTrace, responses.WaterfallSpan),
        *(outputs.TextPiece, outputs.TranscriptPiece, outputs.AudioPiece, outputs.WordsPiece),
        *(outputs.ImagePiece, outputs.FunctionCall, outputs.TokenLogprob, outputs.Candidate, outputs.WordTime),
        outputs.SegmentDecoding,
    )
}
_TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NAMES: dict[type[types.Type], str] = {
    types.StrType: "text", types.IntType: "integer", types.FloatType: "number", types.BoolType: "boolean",
    types.AnyType: "JSON",
}  # fmt: skip
_PARAMETERS = {str: "text", list: "list", float: "number", int: "integer", dict: "JSON"}


def render(document: str) -> str:
    """The document with fresh tables. Raises KeyError for a table that is not known or a field without a meaning."""
    tables = {name: _struct_table(kind) for name, kind in STRUCTS.items()} | {
        "inputs": _tensor_table(PUBLIC_INPUTS, "inputs,"),
        "outputs": _tensor_table(PUBLIC_OUTPUTS, "outputs,"),
        "stage_inputs": _tensor_table(stage_inputs(Stage("any", lambda context: NotImplemented))[:1], "input of stage"),
        "events": _event_table(),
        "parameters": _table(
            ("parameter", "type", "field"),
            ((f"`{key}`", _PARAMETERS[kind], f"`{field}`") for key, (field, kind) in wire.SHORT_FORM.items()),
        ),
        "errors": _error_table(),
    }
    return _TABLE.sub(lambda match: match[1] + tables[match[2]] + match[3], document)


def meanings(doc: str | None) -> dict[str, str]:
    """Name → meaning, from lines `name  meaning`; `a, b  meaning` is one for each."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (doc or "").splitlines():
        entry = re.match(r"\s*(?:├── |└── )?(\w+(?:, \w+)*)  +(\S.*)", line)
        if entry and not (names and line.startswith(" " * 16)):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif names and line.startswith("  "):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return text.replace(" --- ", "---")


def _struct_table(kind: type[msgspec.Struct]) -> str:
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    about = meanings(inspect.getdoc(kind))
    rows: list[tuple[str, ...]] = []
    if info.tag is not None:
        rows.append((f"`{info.tag_field}`", "text", "", f"`{info.tag}`"))
    for field in info.fields:
        rows.append((f"`{field.encode_name}`", _type_name(field.type), _default(field), about[field.name]))
    return _table(("field", "type", "default", "meaning"), rows)


def _default(field: types.Field) -> str:
    if field.required:
        return "needed"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    shown = msgspec.json.encode(value).decode()
    return "" if shown in ("null", "{}", "[]", '""') else f"`{shown.strip(chr(34))}`"


def _type_name(kind: types.Type) -> str:
    match kind:
        case types.UnionType(types=options):
            names = [_type_name(option) for option in options if not isinstance(option, types.NoneType)]
            return " or ".join(dict.fromkeys(names))
        case types.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
        case types.StructType(cls=cls):
            return f"`{cls.__name__}`"
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            return f"list of {_type_name(item)}"
        case types.DictType(value_type=value):
            return f"object of {_type_name(value)}" if not isinstance(value, types.AnyType) else "object"
        case types.Metadata(type=inner):
            return _type_name(inner)
        case types.IntType() | types.FloatType():
            bounds = [(kind.gt, "> {}"), (kind.ge, "≥ {}"), (kind.lt, "< {}"), (kind.le, "≤ {}")]
            limits = [text.format(f"{bound:g}") for bound, text in bounds if bound is not None and abs(bound) < 2**53]
            return ", ".join([_NAMES[type(kind)], *limits])
        case _:
            return _NAMES[type(kind)]


def _tensor_table(specs: Sequence[TensorSpec], after: str) -> str:
    """`after`: the heading of the specs in the docstring of wire.py."""
    names = {dtype: name.removeprefix("TYPE_") for dtype, name in TRITON_TYPES.items()} | {"bytes": "BYTES"}
    section = (inspect.getdoc(wire) or "").partition(f"\n    {after}")[2]
    about = meanings(re.split(r"\n {4}(?=\w)", section)[0])
    rows = [
        (f"`{spec.name}`", names[spec.dtype], str(list(spec.shape)), re.sub(r"^\w+ +\[.*?\] +", "", about[spec.name]))
        for spec in specs
    ]
    return _table(("tensor", "type", "shape", "meaning"), rows)


def _event_table() -> str:
    about = meanings(inspect.getdoc(responses))
    kinds = next(field for field in types.type_info(responses.Event).fields if field.name == "type").type  # type: ignore[attr-defined]
    assert isinstance(kinds, types.LiteralType)
    return _table(("type", "meaning"), ((f"`{kind}`", about[str(kind)]) for kind in _in_order(kinds.values, about)))


def _in_order(values: Iterable[object], order: Iterable[str]) -> list[str]:
    known = list(order)
    return sorted((str(value) for value in values), key=known.index)


def _error_table() -> str:
    about = meanings(inspect.getdoc(errors))
    rows = ((f"`{code}`", f"`{e.__name__}`", str(e.status), about[e.__name__]) for code, e in errors.BY_CODE.items())
    return _table(("code", "class", "HTTP status", "meaning"), rows)


if __name__ == "__main__":
    fresh = render(DOCUMENT.read_text(encoding="utf-8"))
    DOCUMENT.write_text(fresh, encoding="utf-8")
    sys.stderr.write(f"{DOCUMENT}: written\n")
