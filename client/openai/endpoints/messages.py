# SPDX-License-Identifier: Apache-2.0
"""OpenAI chat messages → ours, and their images, audio and video → the media tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton_omni.backends.wire import Message, Part
from triton_omni.data_urls import from_base64, from_data_url, is_data_url
from triton_omni.fetch import read_url
from triton_omni.media import Media, MediaError
from triton_omni.openai.endpoints.tools import checked_calls
from triton_omni.openai.http.budget import Share
from triton_omni.openai.http.calls import Shared
from triton_omni.openai.http.errors import invalid, missing, unsupported
from triton_omni.openai.http.fields import Fields
from triton_omni.openai.http.pools import in_thread

ROLES = ("system", "developer", "user", "assistant", "tool")
AUDIO_FORMATS = ("wav", "mp3", "flac", "opus", "ogg", "aac", "m4a", "mp4", "webm")
MAX_MESSAGES = 2048
MAX_MEDIA = 32
MAX_URL_CHARS = 1 << 27
"""A data URL is a URL; the body's own bound comes first."""
URL_PARTS = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
"""Type of a content part → what is at its URL."""
_ADD = {"image": Media.image, "audio": Media.audio, "video": Media.video}
UNREAD = ("refusal", "annotations", "function_call", "weight", "images", "reasoning")
"""What answers carry and clients send back, and what says nothing to a model."""


class Reader:
    """Reads the messages of one request."""

    def __init__(self, shared: Shared, share: Share) -> None:
        self.media = Media(share.take)
        self.with_video_audio = False
        """Each video part is followed by the video's own audio track."""
        self._media_count = 0
        self._shared = shared

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
        content = await self._content(fields, path, role, is_optional=bool(calls) or fields.has("images"))
        fields.nothing_else(UNREAD)
        return Message(role, content, name, call_id, checked_calls(calls, f"{path}.tool_calls"))  # pyright: ignore[reportArgumentType]

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
        parts = [await self._parts(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
        return tuple(part for several in parts for part in several)

    def _transcript(self, audio: Fields) -> str:
        audio_id = audio.text("id", needed=True) or ""
        transcript = self._shared.transcripts.find(audio_id)
        if transcript is None:
            message = f"There is no audio '{audio_id}', or it has expired; send the text as 'content'."
            raise invalid(audio.name("id"), message, "audio_expired")
        return transcript

    async def _parts(self, value: Any, path: str) -> list[Part]:
        """The part; for a video also its audio track, if that is requested."""
        fields = _fields(value, path)
        kind = fields.text("type", needed=True)
        if kind in ("text", "refusal"):
            return [Part("text", fields.text(kind, needed=True) or "")]
        if kind != "input_audio" and kind not in URL_PARTS:
            raise unsupported(f"{path}.type", f"Content parts of the type '{kind}' are not supported here.")
        self._media_count += 1
        if self._media_count > MAX_MEDIA:
            raise invalid(path, f"A request must have at most {MAX_MEDIA} images, audio files and videos together.")
        inner = _needed(fields, kind)
        return await self._by_url(inner, URL_PARTS[kind]) if kind in URL_PARTS else [await self._input_audio(inner)]

    async def _input_audio(self, fields: Fields) -> Part:
        if fields.choice("format", AUDIO_FORMATS) is None:  # it need not be true: the data itself says what it is
            raise missing(fields.name("format"))
        data = fields.text("data", needed=True, most=MAX_URL_CHARS) or ""
        fields.nothing_else()
        param = fields.name("data")
        decode = from_data_url if is_data_url(data) else from_base64
        with blaming(param, "invalid_audio"):
            return await in_thread(self._shared.pools.media, lambda: self.media.audio(decode(data)))

    async def _by_url(self, fields: Fields, kind: str) -> list[Part]:
        url = fields.text("url", needed=True, most=MAX_URL_CHARS) or ""
        if kind == "image":
            fields.choice("detail", ("auto", "low", "high", "original"))
        fields.nothing_else()
        param = fields.name("url")
        with blaming(param, f"invalid_{kind}_url"):
            data = await self._read(url)
        pools = self._shared.pools
        pool = pools.films if kind == "video" else pools.media
        with blaming(param, f"invalid_{kind}"):
            parts = [await in_thread(pool, _ADD[kind], self.media, data)]
            if kind == "video" and self.with_video_audio:
                parts.append(await in_thread(pool, self.media.video_audio, data))
            return parts

    async def _read(self, url: str) -> bytes:
        pools = self._shared.pools
        if is_data_url(url):
            return await in_thread(pools.media, from_data_url, url)
        return await read_url(url, self._shared.may_fetch, pools.names)


@contextmanager
def blaming(param: str, code: str) -> Iterator[None]:
    """A MediaError in the body becomes an ApiError about the parameter."""
    try:
        yield
    except MediaError as error:
        raise invalid(param, str(error), code) from None


def _fields(value: Any, path: str) -> Fields:
    if not isinstance(value, dict):
        raise invalid(path, f"'{path}' must be an object.", "invalid_type")
    return Fields(value, path)


def _needed(fields: Fields, key: str) -> Fields:
    inner = fields.inner(key)
    if inner is None:
        raise missing(fields.name(key))
    return inner
