# SPDX-License-Identifier: Apache-2.0
"""Output pieces → the events of one response. A pure state machine, no I/O."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterable

from triton_omni.backends.wire import Event
from triton_omni.openai.endpoints.chat_answer import finish_reason_of, tool_calls_of, usage_of
from triton_omni.openai.endpoints.schemas import Json
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.media.audio import Encoder, encoder
from triton_omni.openai.realtime.conversation import PCM_HZ, SAMPLE_BYTES, Item
from triton_omni.pieces import Piece

AddItem = Callable[[Item], Iterable[Json]]
"""Puts an item into the conversation; the events that say so."""


class RealtimeAnswer:
    """Builds one response while its pieces arrive: a message, then function calls.

    `add` is asked for each item, or is None for a response that is in no conversation.
    """

    def __init__(self, response: Json, new_id: Callable[[str], str], add: AddItem | None, *, one_call: bool) -> None:
        self.body = response
        self._speaks = "audio" in response["output_modalities"]
        self._new_id = new_id
        self._add_item = add
        self._one_call = one_call
        self._calls = 0
        self._message: Item | None = None
        self._text: list[str] = []
        self._pcm_bytes = 0
        self._encoder: Encoder | None = None
        self._delivered: Counter[str] = Counter()

    def start(self) -> Iterable[Json]:
        """The event before any piece."""
        yield {"type": "response.created", "response": dict(self.body)}

    def on(self, piece: Piece) -> Iterable[Json]:
        """The events of a piece."""
        if piece.event.piece is not None:
            self._delivered.update(piece.event.piece.usage())
        if piece.text:
            yield from self._open()
            self._text.append(piece.text)
            kind = "output_audio_transcript" if self._speaks else "output_text"
            yield self._part_event(f"response.{kind}.delta", delta=piece.text)
        if piece.audio is not None and self._speaks:
            yield from self._say(self._pcm_encoder(piece).feed(piece.audio))
        for call in tool_calls_of(piece.event):
            if not (self._one_call and self._calls):
                self._calls += 1
                yield from self._call(call["id"], call["function"])

    def end(self, event: Event) -> Iterable[Json]:
        """The last events of a run that has ended by itself."""
        if self._encoder is not None and self._message is not None:
            yield from self._say(self._encoder.finish())
        is_cut = finish_reason_of(event) == "length"
        if not self.body["output"]:
            yield from self._open()
        yield from self._close("incomplete" if is_cut else "completed")
        details = {"type": "incomplete", "reason": "max_output_tokens"} if is_cut else {"type": "completed"}
        yield self._done("incomplete" if is_cut else "completed", details, usage_of(event))

    def cancelled(self, reason: str) -> Iterable[Json]:
        """The last events of a run that was cancelled."""
        yield from self._broken("cancelled", {"type": "cancelled", "reason": reason})

    def failed(self, error: ApiError) -> Iterable[Json]:
        """The last events of a run that has failed."""
        details = {"type": error.kind, "code": error.code, "message": error.message}
        yield from self._broken("failed", {"type": "failed", "error": details})

    # ---
    def _broken(self, status: str, details: Json) -> Iterable[Json]:
        yield from self._close("incomplete")
        yield self._done(status, details, usage_of(Event("end", usage=dict(self._delivered))))

    def _done(self, status: str, details: Json, usage: Json) -> Json:
        sent, read = usage["completion_tokens_details"], usage["prompt_tokens_details"]
        self.body |= {"status": status, "status_details": details}
        self.body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_token_details": {
                "text_tokens": usage["prompt_tokens"] - read["audio_tokens"], "audio_tokens": read["audio_tokens"],
                "image_tokens": 0, "cached_tokens": read["cached_tokens"],
            },
            "output_token_details": {"text_tokens": sent["text_tokens"], "audio_tokens": sent["audio_tokens"]},
        }  # fmt: skip
        return {"type": "response.done", "response": dict(self.body)}

    def _pcm_encoder(self, piece: Piece) -> Encoder:
        if self._encoder is None:
            self._encoder = encoder("pcm16", piece.sample_rate_hz)
        return self._encoder

    def _say(self, pcm: bytes) -> Iterable[Json]:
        if pcm:
            yield from self._open()
            self._pcm_bytes += len(pcm)
            yield self._part_event("response.output_audio.delta", delta=base64.b64encode(pcm).decode())

    def _open(self) -> Iterable[Json]:
        if self._message is not None:
            return
        self._text, self._pcm_bytes = [], 0
        self._message = Item(self._item("message", role="assistant", content=[]))
        yield from self._begin(self._message)
        yield self._part_event("response.content_part.added", part=self._part())

    def _close(self, status: str) -> Iterable[Json]:
        item, self._message = self._message, None
        if item is None:
            return
        self._message = item
        text = "".join(self._text)
        if self._speaks:
            yield self._part_event("response.output_audio.done")
            yield self._part_event("response.output_audio_transcript.done", transcript=text)
            item.json["content"] = [{"type": "output_audio", "transcript": text}]
            item.spoken_ms = self._pcm_bytes * 1000 // (SAMPLE_BYTES * PCM_HZ)
        else:
            yield self._part_event("response.output_text.done", text=text)
            item.json["content"] = [{"type": "output_text", "text": text}]
        yield self._part_event("response.content_part.done", part=self._part())
        self._message = None
        yield from self._finish(item, status)

    def _call(self, call_id: str, function: Json) -> Iterable[Json]:
        yield from self._close("completed")
        item = Item(self._item("function_call", name=function["name"], call_id=call_id, arguments=""))
        yield from self._begin(item)
        arguments = function["arguments"]
        kind = "response.function_call_arguments"
        yield self._event(f"{kind}.delta", item, call_id=call_id, delta=arguments)
        yield self._event(f"{kind}.done", item, call_id=call_id, arguments=arguments, name=function["name"])
        item.json["arguments"] = arguments
        yield from self._finish(item, "completed")

    def _item(self, kind: str, **fields: object) -> Json:
        return {"id": self._new_id("item"), "object": "realtime.item", "type": kind, "status": "in_progress", **fields}

    def _begin(self, item: Item) -> Iterable[Json]:
        self.body["output"].append(item.json)
        yield self._event("response.output_item.added", None, item=dict(item.json))
        if self._add_item is not None:
            yield from self._add_item(item)

    def _finish(self, item: Item, status: str) -> Iterable[Json]:
        item.json["status"] = status
        yield self._event("response.output_item.done", None, item=dict(item.json))
        if self._add_item is not None:
            yield {"type": "conversation.item.done", "item": dict(item.json)}

    def _part(self) -> Json:
        text = "".join(self._text)
        return {"type": "audio", "transcript": text} if self._speaks else {"type": "text", "text": text}

    def _part_event(self, kind: str, **fields: object) -> Json:
        assert self._message is not None, "parts belong to a message"
        return self._event(kind, self._message, content_index=0, **fields)

    def _event(self, kind: str, owner: Item | None, /, **fields: object) -> Json:
        place: Json = {"response_id": self.body["id"], "output_index": len(self.body["output"]) - 1}
        return {"type": kind, **place, **({} if owner is None else {"item_id": owner.id}), **fields}
