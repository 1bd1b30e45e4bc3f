# SPDX-License-Identifier: Apache-2.0
"""docs/coverage.md names tests and files that exist, and leaves no row without a test or a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "coverage.md").read_text()
TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::([\w*]+)`", TEXT)))
ROWS = [
    line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith(("| feature", "| #", "| case"))
]


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_named_tests_exist(file: str, name: str) -> None:
    source = (ROOT / file).read_text()
    assert "def test_" in source if name == "*" else f"def {name}(" in source


def test_named_code_exists() -> None:
    places = re.findall(r"`((?:[a-z0-9_]+/)+(?:[a-z0-9_]+\.py)?|client/[\w/]+\.py|pipelines/\w+)`", TEXT)
    assert len(places) > 20
    missing = [p for p in places if not any((ROOT / base / p).exists() for base in ("", "backends"))]
    assert not missing


def test_every_row_has_a_test_or_says_what_is_open() -> None:
    assert len(ROWS) > 95
    bare = [row for row in ROWS if "::" not in row and "not " not in row.split("|")[-2]]
    assert not bare
    assert [int(n) for n in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)] == list(range(1, 26))


def test_no_case_from_outside_is_left_out() -> None:
    cases = TEXT.partition("## Faults found from outside")[2]
    ids = re.findall(r"^\| ([FS0-9, to]+) ", cases, re.MULTILINE)
    numbers = {kind: set[int]() for kind in ("", "F", "S")}
    for several in ids:
        first, *_, last = (found := re.findall(r"([FS]?)(\d+)", several))[0], found[-1]
        numbers[first[0]] |= {*range(int(first[1]), int(last[1]) + 1)}
    assert numbers == {"": {*range(1, 21)}, "F": {*range(1, 17)}, "S": {*range(1, 16)}}
