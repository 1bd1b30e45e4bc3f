# SPDX-License-Identifier: Apache-2.0
"""Schemas that would hold up everyone's are refused, those of everyday life are not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.expect import accepts
from triton_omni.backends.ar.schemas import check_schema
from triton_omni.backends.ar.tools import check_tools
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest


def inside(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, schema]}}}


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (properties(501), r"500 properties \(got 501\)"),
        (properties(41) | {"minProperties": 2}, "40 properties"),
        ({"items": [properties(20) | {"maxProperties": 9}] * 3}, "40 properties"),
        ({"enum": ["x" * 100 for _ in range(1000)]}, "65536 characters"),
        ({"type": "array", "minItems": 1_000_000}, "minItems must be at most 100000"),
        ({"type": "string", "pattern": "((a{1,500}){1,500}){1,500}"}, "repeat"),
        ({"type": "string", "pattern": "a{1,10000}"}, "repeat"),
        ({"type": "string", "pattern": "a{" + "9" * 5000 + "}"}, "repeat"),
        ({"type": "object", "patternProperties": {"a{1,10000}": {}}}, "repeat"),
        ({"type": "string", "maxLength": 1e9}, "maxLength"),
        ({"type": "string", "pattern": "(?:ab{3}){400,}"}, "repeat"),
    ],
)
def test_schemas_that_take_minutes(schema: dict[str, Any], says: str) -> None:
    for given in (schema, inside(schema)):
        with pytest.raises(BadRequest, match=says) as caught:
            check_schema(given, "sampling.json_schema")
        assert caught.value.where == "sampling.json_schema"
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(BadRequest, match=says) as caught:
        check_tools(GenerateRequest(tools=(tool,), tool_choice="required"))
    assert caught.value.where == "tools[0]"
    check_tools(GenerateRequest(tools=(tool,)))


def test_a_schema_without_a_floor() -> None:
    schema: dict[str, Any] = {}
    for _ in range(2000):
        schema = {"not": schema}
    with pytest.raises(BadRequest, match="deeply"):
        check_schema(schema, "sampling.json_schema")


@pytest.mark.parametrize("levels", [60, 200])
def test_a_deep_schema_is_refused_before_any_stage_works(levels: int) -> None:
    """vLLM refuses it too, but only when the run reaches the thinker."""
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(levels // 2):
        schema = {"anyOf": [schema]}
    if levels < 64:
        check_schema(schema, "sampling.json_schema")
    else:
        with pytest.raises(BadRequest, match="64 levels"):
            check_schema(schema, "sampling.json_schema")


@pytest.mark.parametrize(
    "schema",
    [
        properties(500),
        properties(40) | {"minProperties": 1},
        {"type": "string", "pattern": r"^(\d{4})-(\d{2})-(\d{2})T(\d{2}:){2}\d{2}$", "maxLength": 100_000},
        {"type": "string", "pattern": r"[a-z]{1,64}@[a-z]{1,255}", "minLength": "no number"},
        {"type": "object", "properties": {"pattern": {"type": "string"}, "properties": {"maxLength": 5}}},
        {},
    ],
)
def test_everyday_schemas_are_accepted(schema: dict[str, Any]) -> None:
    accepts(check_schema, inside(schema), "sampling.json_schema")
