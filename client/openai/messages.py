# SPDX-License-Identifier: Apache-2.0
"""OpenAI chat messages → ours, and their speech and pictures → the two media tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from backends.wire import Message, Part
from client.openai import media
from client.openai.errors import invalid, missing, unsupported
from client.openai.fetch import fetch
from client.openai.fields import Fields
from client.openai.transcripts import Transcripts

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 2048
Fetch = Callable[[str, str], Awaitable[bytes]]


class Media:
    """The media tensors of a request, filled part by part."""

    def __init__(self) -> None:
        self._speech: list[np.ndarray] = []
        self._pixels: list[np.ndarray] = []

    def add_speech(self, samples: np.ndarray) -> Part:
        """The part that stands for these samples."""
        offset = sum(len(s) for s in self._speech)
        self._speech.append(samples)
        return Part("audio", offset=offset, length=len(samples), sample_rate=media.SPEECH_HZ)

    def add_picture(self, pixels: np.ndarray) -> Part:
        """The part that stands for this picture."""
        offset = sum(p.size for p in self._pixels)
        self._pixels.append(pixels)
        return Part("image", offset=offset, length=pixels.size, shape=pixels.shape)

    @property
    def audio(self) -> np.ndarray | None:
        return np.concatenate(self._speech) if self._speech else None

    @property
    def image(self) -> np.ndarray | None:
        return np.concatenate([p.reshape(-1) for p in self._pixels]) if self._pixels else None


class Reader:
    """Reads the messages of one request."""

    def __init__(self, transcripts: Transcripts, fetch_url: Fetch = fetch) -> None:
        self.media = Media()
        self._transcripts = transcripts
        self._fetch = fetch_url

    async def read(self, messages: list[Any]) -> tuple[Message, ...]:
        """All messages. Raises ApiError naming the part."""
        if not messages:
            raise invalid("messages", "'messages' must have at least one message.")
        if len(messages) > MAX_MESSAGES:
            raise invalid("messages", f"'messages' may have {MAX_MESSAGES} messages, not {len(messages)}.")
        return tuple([await self._message(m, f"messages[{i}]") for i, m in enumerate(messages)])

    async def _message(self, value: Any, path: str) -> Message:
        fields = _fields(value, path)
        role = fields.choice("role", ROLES)
        if role is None:
            raise missing(f"{path}.role")
        name = fields.text("name") or ""
        calls = fields.items("tool_calls") or []
        if calls and role != "assistant":
            raise invalid(f"{path}.tool_calls", "Only messages of the role 'assistant' have tool calls.")
        call_id = fields.text("tool_call_id", needed=role == "tool") or ""
        content = await self._content(fields, path, role, is_optional=bool(calls))
        fields.nothing_else(("refusal", "annotations", "function_call", "weight"))
        return Message(role, content, name, call_id, tuple(calls))  # pyright: ignore[reportArgumentType]

    async def _content(self, fields: Fields, path: str, role: str, *, is_optional: bool) -> str | tuple[Part, ...]:
        audio = fields.inner("audio")
        content = fields.take("content")
        if audio is not None:
            if role != "assistant":
                raise invalid(f"{path}.audio", "Only messages of the role 'assistant' refer to earlier audio.")
            spoken = self._transcript(audio)
            return spoken if content is None else content if isinstance(content, str) and content else spoken
        if isinstance(content, str):
            return content
        if content is None:
            if is_optional:
                return ""
            raise missing(f"{path}.content")
        if not isinstance(content, list) or not content:
            raise invalid(f"{path}.content", "'content' must be a string or an array of content parts.", "invalid_type")
        return tuple([await self._part(part, f"{path}.content[{i}]") for i, part in enumerate(content)])

    def _transcript(self, audio: Fields) -> str:
        audio_id = audio.text("id", needed=True) or ""
        transcript = self._transcripts.find(audio_id)
        if transcript is None:
            message = f"There is no audio '{audio_id}', or it has expired; send the text as 'content'."
            raise invalid(audio.name("id"), message, "audio_expired")
        return transcript

    async def _part(self, value: Any, path: str) -> Part:
        fields = _fields(value, path)
        kind = fields.text("type", needed=True)
        if kind in ("text", "refusal"):
            return Part("text", fields.text(kind, needed=True) or "")
        if kind == "input_audio":
            return await self._speech(_needed(fields, kind))
        if kind == "image_url":
            return await self._picture(_needed(fields, kind))
        raise unsupported(f"{path}.type", f"Content parts of the type '{kind}' are not supported here.")

    async def _speech(self, fields: Fields) -> Part:
        kind = fields.choice("format", media.AUDIO_FORMATS)
        if kind is None:
            raise missing(fields.name("format"))
        data = fields.text("data", needed=True, most=1 << 27) or ""
        param = fields.name("data")
        raw = media.from_base64(data, param, "invalid_audio")
        return self.media.add_speech(await asyncio.to_thread(media.decode_speech, raw, kind, param))

    async def _picture(self, fields: Fields) -> Part:
        url = fields.text("url", needed=True, most=1 << 27) or ""
        fields.choice("detail", ("auto", "low", "high", "original"))
        param = fields.name("url")
        raw = media.from_data_url(url, param) if url.startswith("data:") else await self._fetch(url, param)
        return self.media.add_picture(await asyncio.to_thread(media.decode_picture, raw, param))


def _fields(value: Any, path: str) -> Fields:
    if not isinstance(value, dict):
        raise invalid(path, f"'{path}' must be an object.", "invalid_type")
    return Fields(value, path)


def _needed(fields: Fields, key: str) -> Fields:
    inner = fields.inner(key)
    if inner is None:
        raise missing(fields.name(key))
    return inner
