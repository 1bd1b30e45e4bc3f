# SPDX-License-Identifier: Apache-2.0
"""Function calls in text: however it is cut, the same is shown and the same is called."""

from __future__ import annotations

import json
import random

import pytest

from triton_omni.backends.ar.tools import CLOSE, OPEN, CallScanner, check_tools, forced_calls
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Sampling

CALL = OPEN + '\n{"name": "weather", "arguments": {"city": "Köln"}}\n' + CLOSE
HALF_PAIR = OPEN + '{"name": "f", "arguments": {"a": "\\ud83d"}}' + CLOSE
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CASES = [
    ("no call at all <tool", "no call at all <tool", 0),
    (CALL, "", 1),
    ("I look. \n" + CALL + "\n" + CALL, "I look.", 2),
    (CALL + "\nDone.\n", "\nDone.\n", 1),
    (OPEN + "not json" + CLOSE + " x", OPEN + "not json" + CLOSE + " x", 0),
    (OPEN + "[1]" + CLOSE, OPEN + "[1]" + CLOSE, 0),
    (OPEN + '{"name": "f", "arguments": "text"}' + CLOSE, OPEN + '{"name": "f", "arguments": "text"}' + CLOSE, 0),
    (HALF_PAIR, HALF_PAIR, 0),
    ("a" + CALL[:-3], "a" + CALL[:-3], 0),
    ("< <t <tool_call", "< <t <tool_call", 0),
    (CALL + OPEN + "x" + CLOSE, OPEN + "x" + CLOSE, 1),
]


def scan(pieces):
    scanner, said, calls = CallScanner(), [], []
    for place, piece in enumerate(pieces):
        text, found = scanner.feed(piece, place + 1 == len(pieces))
        said.append(text)
        calls += found
    assert scanner.calls_seen == len(calls)
    return "".join(said), calls


@pytest.mark.parametrize(("text", "shown", "count"), CASES)
def test_cutting_changes_nothing(text, shown, count):
    rng = random.Random(text)
    for _ in range(30):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
        said, calls = scan([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
        assert said == shown
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [("weather", {"city": "Köln"})] * count
        assert len({c.id for c in calls}) == count


def test_text_before_a_call_is_not_held_back():
    scanner = CallScanner()
    assert scanner.feed("hello", False) == ("hello", [])
    assert scanner.feed(" <b", False) == (" <b", [])


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"tools": ({"type": "function"},)}, "tools[0]"),
        ({"tools": ({"type": "function", "function": {"name": ""}},)}, "tools[0]"),
        ({"tools": ({"type": "function", "function": {"name": "f", "parameters": 1}},)}, "tools[0]"),
        ({"tools": (TOOL,), "tool_choice": "other"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": (TOOL,), "tool_choice": "required", "sampling": Sampling(json_schema={})}, "tool_choice"),
    ],
)
def test_refused(given, where):
    with pytest.raises(BadRequest) as caught:
        check_tools(GenerateRequest(**given))
    assert caught.value.where == where


def test_choices():
    other = {"type": "function", "function": {"name": "other"}}
    for choice, count in (("required", 2), ("weather", 1)):
        check_tools(GenerateRequest(tools=(TOOL, other), tool_choice=choice))
        form = json.loads(forced_calls((TOOL, other), choice) or "")["format"]
        assert len(form["tags"]) == count
        assert form["stop_after_first"] is (choice == "weather")
    assert forced_calls((TOOL,), "auto") is None
