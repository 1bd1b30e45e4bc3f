# SPDX-License-Identifier: Apache-2.0
"""docs/wire.md says exactly what the code does: every tensor, type, field, parameter and error code."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from triton_omni.backends import wire
from triton_omni.backends.core.errors import BY_CODE
from triton_omni.backends.core.generate import (
    MAX_REQUEST_ID_CHARS,
    Deadlines,
    GenerateRequest,
    ImageParams,
    Message,
    Part,
    Sampling,
    SpeechParams,
    TranscriptionParams,
)
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE
from triton_omni.backends.repository import PUBLIC_INPUTS, PUBLIC_OUTPUTS, TRITON_TYPES, stage_inputs

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")
DOCUMENTED = [GenerateRequest, Message, Part, Sampling, ImageParams, SpeechParams, TranscriptionParams, Deadlines]
KINDS = {str: "text", list: "list", float: "number", int: "integer", dict: "JSON"}


def table(heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without backquotes."""
    section = re.split(r"^#+ ", TEXT.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def described(specs):
    types = {name: name_of.removeprefix("TYPE_") for name, name_of in TRITON_TYPES.items()} | {"bytes": "BYTES"}
    return [[s.name, types[s.dtype], str(list(s.shape))] for s in specs]


def test_tensors():
    assert [row[:3] for row in table("Inputs of the public model")] == described(PUBLIC_INPUTS)
    assert [row[:3] for row in table("Outputs of the public model")] == described(PUBLIC_OUTPUTS)
    own = [s for s in stage_inputs(PIPELINE.stage("tokens")) if s not in PUBLIC_INPUTS]
    assert [row[:3] for row in table("Tensors of stage models")] == described(own)


def test_event_types_and_fields():
    types = typing.get_args(typing.get_type_hints(wire.Event)["type"])
    assert [row[0] for row in table("Event types (`Event.type`)")] == list(types)
    assert [row[0] for row in table("Event fields (`Event`)")] == list(wire.Event.__struct_fields__)


@pytest.mark.parametrize("kind", DOCUMENTED, ids=lambda k: k.__name__)
def test_request_fields(kind):
    heading = "The request (`GenerateRequest`)" if kind is GenerateRequest else f"`{kind.__name__}`"
    assert [row[0] for row in table(heading)] == list(kind.__struct_fields__)


def test_parameters():
    expected = [[key, KINDS[kind], place] for key, (place, kind) in wire.SHORT_FORM.items()]
    assert table("Request parameters of the short form") == expected
    assert all(f"`{name}`" in TEXT for name in wire._IGNORED_PARAMETERS)


def test_errors():
    expected = [[code, cls.__name__, str(cls.status)] for code, cls in BY_CODE.items()]
    assert [row[:3] for row in table("Errors")] == expected
    assert f"A request id may have {MAX_REQUEST_ID_CHARS} characters" in TEXT


def test_version_and_every_row_says_something():
    assert f"`WIRE_VERSION` = {wire.WIRE_VERSION}" in TEXT
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert all(row.rstrip("| ").rpartition("|")[2].strip() for row in rows)
