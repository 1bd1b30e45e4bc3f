# SPDX-License-Identifier: Apache-2.0
"""Function calls in written text, in the form that many chat templates teach: <tool_call>{JSON}</tool_call>."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from triton_omni.backends.ar.schemas import check_schema
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.outputs import FunctionCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ANY, MUST = "auto", "required"


class CallScanner:
    """Removes function calls, and the white space in front of them, from the streamed text of one answer."""

    def __init__(self) -> None:
        self._held = ""
        self.calls_seen = 0

    def feed(self, text: str, last: bool) -> tuple[str, list[FunctionCall]]:
        """(text for the client, complete calls); after `last` nothing is held back."""
        self._held += text
        visible: list[str] = []
        calls: list[FunctionCall] = []
        while (begin := self._held.find(OPEN)) >= 0 and (end := self._held.find(CLOSE, begin)) >= 0:
            call = _call(self._held[begin + len(OPEN) : end])
            end += len(CLOSE)
            visible.append(self._held[:end] if call is None else self._held[:begin].rstrip())
            calls += [] if call is None else [call]
            self._held = self._held[end:]
        shown = len(self._held) if last else _safe_length(self._held)
        visible.append(self._held[:shown])
        self._held = self._held[shown:]
        self.calls_seen += len(calls)
        return "".join(visible), calls


def _safe_length(text: str) -> int:
    """Length of the prefix of `text` that cannot belong to a call."""
    begin = text.find(OPEN)
    if begin < 0:
        begin = next((len(text) - n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), len(text))
    return len(text[:begin].rstrip())


def _call(text: str) -> FunctionCall | None:
    """The call that a JSON text stands for, if it is one."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        encoded = json.dumps(arguments, ensure_ascii=False)
        (name + encoded).encode()  # JSON can hold half of a surrogate pair, UTF-8 cannot
    except (ValueError, RecursionError):
        return None
    return FunctionCall(f"call_{secrets.token_hex(12)}", name, encoded)


def check_tools(request: GenerateRequest) -> None:
    """Raise BadRequest for tools that are not functions, and for a choice that names none of them."""
    for index, tool in enumerate(request.tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequest("a tool needs a function with a name", f"tools[{index}]")
        if not isinstance(function.get("parameters", {}), Mapping):
            raise BadRequest("a function's parameters must be a JSON schema", f"tools[{index}]")
        if request.tool_choice != ANY:  # the grammar of a forced call
            check_schema(function.get("parameters", {}), f"tools[{index}]")
    names = [tool["function"]["name"] for tool in request.tools]
    if request.tool_choice not in (ANY, *names) and not (names and request.tool_choice == MUST):
        raise BadRequest(f"'{request.tool_choice}' is not one of: auto, required, {', '.join(names)}", "tool_choice")
    if request.tool_choice != ANY and request.sampling.json_schema is not None:
        raise BadRequest("an answer is either a call or JSON of a schema", "tool_choice")


def forced_calls(tools: Sequence[Mapping[str, Any]], choice: str) -> str | None:
    """The grammar (xgrammar's structural tag, as JSON) of an answer that must be a call; None if calls are optional."""
    if choice == ANY:
        return None
    tags = [_tag(tool["function"]) for tool in tools if choice in (MUST, tool["function"]["name"])]
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": choice != MUST,
    }
    return json.dumps({"type": "structural_tag", "format": calls})


def _tag(function: Mapping[str, object]) -> dict[str, object]:
    schema = function.get("parameters") or {"type": "object"}
    return {
        "type": "tag",
        "begin": f'{OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1},  # see load.py
        "end": f"}}\n{CLOSE}",
    }
