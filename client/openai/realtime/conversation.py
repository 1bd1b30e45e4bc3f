# SPDX-License-Identifier: Apache-2.0
"""The items of one session in order, as its client sees them and as messages of a chat. Pure."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from triton_omni.data_urls import from_base64
from triton_omni.media import MediaError
from triton_omni.openai.endpoints import schemas
from triton_omni.openai.endpoints.schemas import ChatMessage, ContentPart, Json
from triton_omni.openai.http.errors import ApiError, invalid
from triton_omni.openai.realtime import events
from triton_omni.openai.realtime.events import PCM_HZ

SAMPLE_BYTES = 2
MAX_ITEMS = schemas.MAX_MESSAGES
ROOT = "root"
"""The place before the first item."""


@dataclass
class Item:
    """One item.

    json       as the client sees it, without audio
    pcm        content index → the client's 16-bit samples at PCM_HZ
    spoken_ms  length of an answer's audio, which is not kept
    nbytes     what it holds, for the proxy's budget
    """

    json: Json
    pcm: dict[int, bytes] = field(default_factory=dict[int, bytes])
    spoken_ms: int | None = None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = len(msgspec.json.encode(self.json)) + sum(map(len, self.pcm.values()))

    @property
    def id(self) -> str:
        return self.json["id"]

    def with_audio(self) -> Json:
        """The item with its audio as base64."""
        if not self.pcm:
            return self.json
        content = [dict(part) for part in self.json["content"]]
        for index, pcm in self.pcm.items():
            content[index]["audio"] = base64.b64encode(pcm).decode()
        return self.json | {"content": content}

    def transcribe(self, text: str) -> None:
        """Set the words of an item of one audio part."""
        self.json["content"][0]["transcript"] = text

    def truncate(self, index: int, end_ms: int) -> None:
        """Forget what comes after `end_ms` of an answer's audio, and the same share of its words.

        Raises ApiError for what has no audio there.
        """
        total_ms = self.spoken_ms
        if index or total_ms is None:
            raise invalid("content_index", f"Item '{self.id}' has no audio of an answer at content index {index}.")
        if end_ms > total_ms:
            message = f"Audio content of {total_ms} ms is already shorter than {end_ms} ms."
            raise invalid("audio_end_ms", message)
        part = self.json["content"][index]
        words: str = part["transcript"]
        kept = len(words) * end_ms // total_ms if total_ms else 0
        if kept < len(words):
            part["transcript"] = words[: kept + 1].rpartition(" ")[0]
        self.spoken_ms = end_ms


class RealtimeConversation:
    """Items by id, in order."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def find(self, item_id: str) -> Item:
        """Raises ApiError for an id that is not there."""
        return self.items[self._index(item_id, "item_id")]

    def place_after(self, previous_id: str | None) -> int:
        """Where an item after `previous_id` goes. Raises ApiError."""
        if previous_id is None:
            return len(self.items)
        return 0 if previous_id == ROOT else self._index(previous_id, "previous_item_id") + 1

    def insert(self, item: Item, place: int | None = None) -> str | None:
        """Add an item; returns the id of the one before it. Raises ApiError for one too many or an id that is there."""
        if len(self.items) >= MAX_ITEMS:
            raise invalid("item", f"A conversation may have {MAX_ITEMS} items; delete some.")
        if any(other.id == item.id for other in self.items):
            raise invalid("item.id", f"There is an item '{item.id}' already.")
        place = len(self.items) if place is None else place
        self.items.insert(place, item)
        return self.items[place - 1].id if place else None

    def delete(self, item_id: str) -> Item:
        """Remove an item. Raises ApiError."""
        return self.items.pop(self._index(item_id, "item_id"))

    def _index(self, item_id: str, param: str) -> int:
        for index, item in enumerate(self.items):
            if item.id == item_id:
                return index
        raise invalid(param, f"There is no item '{item_id[:100]}'.", "item_not_found")


def made_item(given: events.GivenItem, new_id: Callable[[str], str]) -> Item:
    """A client's item. Raises ApiError for audio that is none."""
    match given:
        case events.SpokenItem():
            pcm: dict[int, bytes] = {}
            content = [_part(pcm, given.role, part, i) for i, part in enumerate(given.content)]
            head = _head(given.id or new_id("item"), "message")
            return Item(head | {"role": given.role, "content": content}, pcm)
        case events.CallItem():
            call = {"name": given.name, "arguments": given.arguments, "call_id": given.call_id}
            return Item(_head(given.id or new_id("item"), "function_call") | call)
        case events.CallOutputItem():
            answer = {"call_id": given.call_id, "output": given.output}
            return Item(_head(given.id or new_id("item"), "function_call_output") | answer)


def spoken_item(item_id: str, pcm: bytes) -> Item:
    """The item of a committed turn."""
    content = [{"type": "input_audio", "transcript": None}]
    return Item(_head(item_id, "message") | {"role": "user", "content": content}, {0: pcm})


def _head(item_id: str, kind: str) -> Json:
    return {"id": item_id, "object": "realtime.item", "type": kind, "status": "completed"}


_PARTS = {
    "system": events.TextContent,
    "user": events.TextContent | events.AudioContent | events.ImageContent,
    "assistant": events.AnsweredText | events.AnsweredAudio,
}


def _part(pcm: dict[int, bytes], role: str, part: object, index: int) -> Json:
    param = f"item.content[{index}]"
    if not isinstance(part, _PARTS[role]):
        raise invalid(f"{param}.type", f"Messages of the role '{role}' have no content of this type.")
    match part:
        case events.TextContent():
            return {"type": "input_text", "text": part.text}
        case events.AnsweredText():
            return {"type": "output_text", "text": part.text}
        case events.AnsweredAudio():
            return {"type": "output_audio", "transcript": part.transcript}
        case events.ImageContent():
            return {"type": "input_image", "image_url": part.image_url, "detail": part.detail or "auto"}
        case events.AudioContent():
            pcm[index] = samples_of(part.audio, f"{param}.audio")
            return {"type": "input_audio", "transcript": part.transcript}
        case _:
            raise AssertionError(part)


def samples_of(audio: str, param: str) -> bytes:
    """16-bit samples from base64. Raises ApiError."""
    try:
        pcm = from_base64(audio)
    except MediaError as error:
        raise invalid(param, str(error), "invalid_audio") from None
    if len(pcm) % SAMPLE_BYTES:
        message = f"'{param}' must be whole samples of {SAMPLE_BYTES} bytes (got {len(pcm)} bytes)."
        raise invalid(param, message, "invalid_audio")
    return pcm


def wav(pcm: bytes) -> bytes:
    """A file of 16-bit samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(SAMPLE_BYTES)
        writer.setframerate(PCM_HZ)
        writer.writeframes(pcm)
    return file.getvalue()


def messages_of(instructions: str, items: Sequence[Item]) -> tuple[list[ChatMessage], list[str]]:
    """A chat of these items, and beside each message the parameter that it comes from.

    Function calls join the assistant's message before them, as the answer had them.
    """
    messages = [ChatMessage(role="system", content=instructions)] if instructions else []
    params = ["instructions"] if instructions else []
    for item in items:
        message = _message(item, messages)
        if message is not None:
            messages.append(message)
            params.append(f"item '{item.id}'")
    if not any(message.role != "system" for message in messages):
        raise invalid("conversation", "There is nothing to answer: add an item first.", "conversation_empty")
    return messages, params


def _message(item: Item, before: Sequence[ChatMessage]) -> ChatMessage | None:
    json = item.json
    match json["type"]:
        case "function_call":
            function = schemas.CalledFunction(name=json["name"], arguments=json["arguments"])
            call = schemas.ToolCall(id=json["call_id"], function=function)
            if before and before[-1].role == "assistant":
                before[-1].tool_calls = [*(before[-1].tool_calls or ()), call]
                return None
            return ChatMessage(role="assistant", tool_calls=[call])
        case "function_call_output":
            return ChatMessage(role="tool", content=json["output"], tool_call_id=json["call_id"])
        case _:
            pass
    content: list[Json] = json["content"]
    if json["role"] == "user":
        parts = [_content(part, item.pcm.get(index, b"")) for index, part in enumerate(content)]
        return ChatMessage(role="user", content=parts)
    text = "".join(part.get("text") or part.get("transcript") or "" for part in content)
    return ChatMessage(role=json["role"], content=text) if text else None


def _content(part: Json, pcm: bytes) -> ContentPart:
    match part["type"]:
        case "input_text":
            return schemas.TextPart(text=part["text"])
        case "input_image":
            return schemas.ImageUrlPart(image_url=part["image_url"])
        case _:
            pass
    if part["transcript"] is not None:
        return schemas.TextPart(text=part["transcript"])
    data = base64.b64encode(wav(pcm)).decode()
    return schemas.InputAudioPart(input_audio=schemas.InputAudio(data=data, format="wav"))


def refused(error: ApiError, event_id: str | None) -> Json:
    """The `error` of an event that was refused."""
    return {
        "type": error.kind, "code": error.code, "message": error.message, "param": error.param, "event_id": event_id
    }  # fmt: skip
