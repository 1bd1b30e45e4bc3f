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

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ANY, MUST = "auto", "required"


class CallScanner:
    """Takes the text of one answer as it comes and takes the calls out of it, with the blanks in front of them."""

    def __init__(self) -> None:
        self._held = ""
        self.found = 0

    def feed(self, text: str, last: bool) -> tuple[str, list[dict[str, str]]]:
        """(what may be shown, calls that are complete); after `last` nothing is held back."""
        self._held += text
        said: list[str] = []
        calls: list[dict[str, str]] = []
        while (begin := self._held.find(OPEN)) >= 0 and (end := self._held.find(CLOSE, begin)) >= 0:
            call = _call(self._held[begin + len(OPEN) : end])
            end += len(CLOSE)
            said.append(self._held[:end] if call is None else self._held[:begin].rstrip())
            calls += [] if call is None else [call]
            self._held = self._held[end:]
        shown = len(self._held) if last else _harmless(self._held)
        said.append(self._held[:shown])
        self._held = self._held[shown:]
        self.found += len(calls)
        return "".join(said), calls


def _harmless(text: str) -> int:
    """How many characters of `text` cannot belong to a call."""
    begin = text.find(OPEN)
    if begin < 0:
        begin = next((len(text) - n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), len(text))
    return len(text[:begin].rstrip())


def _call(text: str) -> dict[str, str] | None:
    """The call that a JSON text stands for, if it is one."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        (name + written).encode()  # half of a surrogate pair can be written as JSON, but not sent
    except (ValueError, RecursionError):
        return None
    return {"id": f"call_{secrets.token_hex(12)}", "name": name, "arguments": written}


def check_tools(request: GenerateRequest) -> None:
    """Raise BadRequest for tools that are no functions, and for a choice that none of them is."""
    for place, tool in enumerate(request.tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequest("a tool needs a function with a name", f"tools[{place}]")
        if not isinstance(function.get("parameters", {}), Mapping):
            raise BadRequest("a function's parameters are a JSON schema", f"tools[{place}]")
        if request.tool_choice != ANY:  # the grammar of a forced call
            check_schema(function.get("parameters", {}), f"tools[{place}]")
    names = [tool["function"]["name"] for tool in request.tools]
    if request.tool_choice not in (ANY, *names) and not (names and request.tool_choice == MUST):
        raise BadRequest(f"'{request.tool_choice}' is not one of: auto, required, {', '.join(names)}", "tool_choice")
    if request.tool_choice != ANY and request.sampling.json_schema is not None:
        raise BadRequest("an answer is either a call or JSON of a schema", "tool_choice")


def forced_calls(tools: Sequence[Mapping[str, Any]], choice: str) -> str | None:
    """The grammar (xgrammar's structural tag, as JSON) of an answer that must be a call; None if it need not."""
    if choice == ANY:
        return None
    tags = [_tag(tool["function"]) for tool in tools if choice in (MUST, tool["function"]["name"])]
    form = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": choice != MUST,
    }
    return json.dumps({"type": "structural_tag", "format": form})


def _tag(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object"}
    return {
        "type": "tag",
        "begin": f'{OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": f"}}\n{CLOSE}",
    }
