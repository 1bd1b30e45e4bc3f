# SPDX-License-Identifier: Apache-2.0
"""docs/wire.md says exactly what the code does: its tables are those that `make repository` writes from the types."""

from __future__ import annotations

import re

import msgspec
import pytest

from docs import wire_tables
from triton_omni.backends import wire
from triton_omni.backends.core.generate import MAX_REQUEST_ID_CHARS

TEXT = wire_tables.DOCUMENT.read_text(encoding="utf-8")
TABLES = re.findall(r"<!-- table (\w+) -->", TEXT)


def test_the_tables_are_fresh():
    assert wire_tables.render(TEXT) == TEXT, "run `make repository`"


def test_every_struct_of_the_wire_has_its_table_once():
    structs = {value for name in wire.__all__ if isinstance(value := getattr(wire, name), type)}
    on_the_wire = {kind.__name__ for kind in structs if issubclass(kind, msgspec.Struct)}
    assert on_the_wire <= set(wire_tables.STRUCTS)
    others = {"inputs", "outputs", "stage_inputs", "events", "parameters", "errors"}
    assert sorted(TABLES) == sorted(set(wire_tables.STRUCTS) | others)


def test_a_changed_type_makes_the_tables_stale(monkeypatch):
    monkeypatch.setitem(wire.SHORT_FORM, "mood", ("speech.mood", str))
    assert "| `mood` | text | `speech.mood` |" in wire_tables.render(TEXT)


def test_a_field_without_a_meaning_is_an_error(monkeypatch):
    class Undocumented(msgspec.Struct):
        """A struct.

        given  something
        """

        given: str
        untold: int

    monkeypatch.setitem(wire_tables.STRUCTS, "Event", Undocumented)
    with pytest.raises(KeyError, match="untold"):
        wire_tables.render(TEXT)


def test_every_row_says_something():
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]
    assert len(rows) > 120
    assert all(row.rstrip("| ").rpartition("|")[2].strip() for row in rows)


def test_what_stands_between_the_tables():
    assert f"`WIRE_VERSION` = {wire.WIRE_VERSION}" in TEXT
    assert f"A request id has at most {MAX_REQUEST_ID_CHARS} characters" in TEXT
    assert all(f"`{name}`" in TEXT for name in wire._IGNORED_PARAMETERS)
