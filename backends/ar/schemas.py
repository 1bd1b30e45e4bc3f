# SPDX-License-Identifier: Apache-2.0
"""What a JSON schema may cost. Pure.

A grammar is compiled whole, one after the other, and cannot be stopped: a schema without these bounds keeps all others
waiting for minutes and takes gigabytes, long after its own request has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from triton_omni.backends.core.errors import BadRequest

MAX_CHARS = 65_536
MAX_DEPTH = 64  # objects and arrays inside each other: vLLM's own bound
MAX_PROPERTIES = 500  # of one object; time grows with their third power
MAX_COUNTED = 40  # of all objects that bound how many may be there: 100 take 6 s, 200 over a minute
MAX_COUNT = 100_000
MAX_REPEATS = 1000  # of a pattern; those of a group multiply with what is in it
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def check_schema(schema: Mapping[str, object], where: str) -> None:
    """Raise BadRequest for a schema that would take too long to compile."""
    try:
        size = len(json.dumps(schema))
    except RecursionError:
        raise BadRequest("the schema is nested too deeply", where) from None
    if size > MAX_CHARS:
        raise BadRequest(f"a schema must be at most {MAX_CHARS} characters (got {size})", where)
    if _depth(schema) > MAX_DEPTH:
        raise BadRequest(f"a schema must be nested at most {MAX_DEPTH} levels deep", where)
    counted = 0
    for node in _objects(schema):
        properties, named = node.get("properties"), node.get("patternProperties")
        patterns = [node.get("pattern"), *(named if isinstance(named, Mapping) else ())]
        if isinstance(properties, Mapping) and len(properties) > MAX_PROPERTIES:
            raise BadRequest(f"an object must have at most {MAX_PROPERTIES} properties (got {len(properties)})", where)
        if isinstance(properties, Mapping) and ("minProperties" in node or "maxProperties" in node):
            counted += len(properties)
        for key in COUNTS:
            if isinstance(count := node.get(key), int | float) and count > MAX_COUNT:
                raise BadRequest(f"{key} must be at most {MAX_COUNT} (got {count})", where)
        if any(isinstance(pattern, str) and _repeats(pattern) > MAX_REPEATS for pattern in patterns):
            raise BadRequest(f"a pattern must repeat its parts at most {MAX_REPEATS} times", where)
    if counted > MAX_COUNTED:
        raise BadRequest(
            f"objects with minProperties or maxProperties must have at most {MAX_COUNTED} properties", where
        )


def _depth(value: Mapping[str, object]) -> int:
    """Levels of objects and arrays inside each other."""
    depth, level = 0, list[Mapping[str, object] | list[object]]([value])
    while level:
        depth += 1
        parents = [node.values() if isinstance(node, Mapping) else node for node in level]
        level = [child for children in parents for child in children if isinstance(child, Mapping | list)]
    return depth


def _objects(value: object) -> Iterator[Mapping[str, object]]:
    """All objects in a JSON value."""
    left: list[object] = [value]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _repeats(pattern: str) -> float:
    """Copies of its parts that a pattern stands for at most, roughly."""
    singles, groups = 1.0, 1.0
    for repeat in _REPEAT.finditer(pattern):
        count = max(float(number) for number in repeat.groups() if number)  # int refuses 5000 digits
        if pattern.endswith(")", 0, repeat.start()):
            groups *= max(1, count)
        else:
            singles += count
    return singles * groups
