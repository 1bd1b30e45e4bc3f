# SPDX-License-Identifier: Apache-2.0
"""Output pieces → OpenAI's response and the events of its stream. A pure state machine, no I/O."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from triton_omni.backends.wire import Event
from triton_omni.openai.endpoints.chat_answer import finish_reason_of, logprobs_of, tool_calls_of, usage_of
from triton_omni.openai.endpoints.chat_request import ChatCall
from triton_omni.openai.endpoints.schemas import Json, ResponsesBody
from triton_omni.openai.http.errors import ApiError
from triton_omni.pieces import Piece

ERROR_CODES = frozenset({"server_error", "rate_limit_exceeded", "invalid_prompt"})
"""Those of ours that OpenAI's type of a failed response knows."""


class ResponsesAnswer:
    """Builds one response while its pieces arrive: a message, function calls, in the order in which they come."""

    def __init__(self, body: ResponsesBody, call: ChatCall, response_id: str, created: float) -> None:
        self.body = _head(body, response_id, created)
        self._number = response_id.removeprefix("resp_")
        self._call = call
        self._sequence = 0
        self._calls = 0
        self._message: Json | None = None
        self._text: list[str] = []
        self._logprobs: list[Json] = []

    def start(self) -> Iterable[Json]:
        """The events before any piece."""
        yield self._event("response.created", response=self.body)
        yield self._event("response.in_progress", response=self.body)

    def on(self, piece: Piece) -> Iterable[Json]:
        """The events of a piece; that of the end comes from `end`."""
        if piece.event.type != "text" or piece.text is None:
            return
        logprobs = [] if self._call.top_logprobs is None else logprobs_of(piece.event, self._call.top_logprobs)
        if piece.text or logprobs:
            yield from self._write(piece.text, logprobs)
        for call in tool_calls_of(piece.event):
            if not (self._call.one_call and self._calls):
                self._calls += 1
                yield from self._call_function(call["id"], call["function"])

    def end(self, event: Event, completed: float) -> Iterable[Json]:
        """The last events, after the end of the run. From then on `body` is complete."""
        is_cut = finish_reason_of(event) == "length"
        if not self.body["output"]:
            yield from self._open_message()
        yield from self._close_message("incomplete" if is_cut else "completed")
        self.body["usage"] = _usage(event)
        if is_cut:
            self.body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self.body |= {"status": "completed", "completed_at": completed}

    def final(self) -> Json:
        """The event with the whole response, which ends the stream."""
        return self._event(f"response.{self.body['status']}", response=self.body)

    def failed(self, error: ApiError) -> Json:
        """The event that ends a stream which fails midway."""
        code = error.code if error.code in ERROR_CODES else "server_error"
        self.body |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=self.body)

    # ---
    def _write(self, text: str, logprobs: list[Json]) -> Iterable[Json]:
        if self._message is None:
            yield from self._open_message()
        self._text.append(text)
        self._logprobs += logprobs
        yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _open_message(self) -> Iterable[Json]:
        item: Json = {"id": self._item_id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
        self._message = item | {"content": []}
        self._text, self._logprobs = [], []
        yield self._add(self._message)
        yield self._part_event("response.content_part.added", part=self._part())

    def _close_message(self, status: str) -> Iterable[Json]:
        if self._message is None:
            return
        part = self._part()
        yield self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._part_event("response.content_part.done", part=part)
        self._message |= {"status": status, "content": [part]}
        yield self._done(self._message)
        self._message = None

    def _call_function(self, call_id: str, function: Json) -> Iterable[Json]:
        yield from self._close_message("completed")
        item: Json = {
            "id": self._item_id("fc"), "type": "function_call", "status": "in_progress", "call_id": call_id,
            "name": function["name"], "arguments": "",
        }  # fmt: skip
        yield self._add(item)
        place = {"item_id": item["id"], "output_index": len(self.body["output"]) - 1}
        arguments = function["arguments"]
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event("response.function_call_arguments.done", **place, arguments=arguments, name=function["name"])
        item |= {"status": "completed", "arguments": arguments}
        yield self._done(item)

    def _item_id(self, kind: str) -> str:
        """An id that says in which response the item is, and where: ResponseStore.response_of_item reads it."""
        return f"{kind}_{self._number}_{len(self.body['output'])}"

    def _part(self) -> Json:
        text = "".join(self._text)
        return {"type": "output_text", "annotations": [], "logprobs": list(self._logprobs), "text": text}

    def _add(self, item: Json) -> Json:
        self.body["output"].append(item)
        return self._event("response.output_item.added", output_index=len(self.body["output"]) - 1, item=dict(item))

    def _done(self, item: Json) -> Json:
        return self._event("response.output_item.done", output_index=len(self.body["output"]) - 1, item=dict(item))

    def _part_event(self, kind: str, **fields: object) -> Json:
        assert self._message is not None, "parts belong to a message"
        place = {"item_id": self._message["id"], "output_index": len(self.body["output"]) - 1, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: object) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}


def _head(body: ResponsesBody, response_id: str, created: float) -> Json:
    """The response before its first piece: what the request asked for."""
    wanted = body.text.format if body.text is not None else None
    choice = body.tool_choice or "auto"
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"} if wanted is None else msgspec.to_builtins(wanted)},
        "tool_choice": choice if isinstance(choice, str) else msgspec.to_builtins(choice),
        "tools": [{"parameters": None, "strict": None, **msgspec.to_builtins(tool)} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


def _usage(end: Event) -> Json:
    chat = usage_of(end)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": chat["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
    }
