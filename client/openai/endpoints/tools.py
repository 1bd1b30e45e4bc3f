# SPDX-License-Identifier: Apache-2.0
"""Function tools: what a request may call, calls in its history, and calls in an answer. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from triton_omni.backends.wire import Event
from triton_omni.openai.http.errors import invalid, missing, unsupported
from triton_omni.openai.http.fields import Fields

Json = dict[str, Any]
MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_tools(fields: Fields) -> tuple[tuple[Json, ...], str]:
    """(tools, choice) as the wire has them. Raises ApiError naming the parameter."""
    tools = fields.items("tools") or []
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"'tools' may have {MAX_TOOLS} tools, not {len(tools)}.")
    names = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    choice = fields.take("tool_choice")
    if choice == "none":
        return (), "auto"
    if choice is None:
        return tuple(tools), "auto"
    if not tools:
        raise invalid("tool_choice", "'tool_choice' needs 'tools'.")
    return tuple(tools), choice if choice in ("auto", "required") else _named(choice, names)


def _function(tool: Any, path: str) -> str:
    """The name of a tool's function."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise unsupported(path, "Only tools of the type 'function' are supported.")
    function = Fields(tool, path).inner("function")
    if function is None:
        raise missing(f"{path}.function")
    function.record("parameters")
    name = function.text("name", needed=True) or ""
    if not _NAME.fullmatch(name):
        raise invalid(function.name("name"), "A function's name has 1 to 64 letters, digits, '_' and '-'.")
    return name


def _named(choice: Any, names: Sequence[str]) -> str:
    """The name in {"type": "function", "function": {"name": …}}."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise unsupported("tool_choice", "'tool_choice' may be 'none', 'auto', 'required' or name one function.")
    function = Fields(choice, "tool_choice").inner("function")
    name = None if function is None else function.text("name")
    if name is None:
        raise missing("tool_choice.function.name")
    if name in ("auto", "required"):
        raise unsupported("tool_choice.function.name", f"A function named '{name}' can be offered, not forced.")
    if name not in names:
        raise invalid("tool_choice.function.name", f"There is no function '{name}' in 'tools'.")
    return name


def checked_calls(calls: Sequence[Any], path: str) -> tuple[Json, ...]:
    """Calls that an earlier answer made. Raises ApiError naming the parameter."""
    for i, call in enumerate(calls):
        at = f"{path}[{i}]"
        if not isinstance(call, dict):
            raise invalid(at, f"'{at}' must be an object.", "invalid_type")
        fields = Fields(call, at)
        fields.text("id", needed=True)
        function = fields.inner("function")
        if function is None:
            raise missing(f"{at}.function")
        function.text("name", needed=True)
        function.text("arguments", needed=True)
    return tuple(calls)


def calls_of(event: Event) -> list[Json]:
    """Calls that an event brings, as an answer has them; each comes once and complete."""
    return [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in event.meta.get("tool_calls", [])
    ]
