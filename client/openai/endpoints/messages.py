# SPDX-License-Identifier: Apache-2.0
"""OpenAI chat messages → ours, and their audio, images and videos → the media tensors."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from triton_omni.backends.wire import Message, Part
from triton_omni.data_urls import from_base64, from_data_url, is_data_url
from triton_omni.fetch import read_url
from triton_omni.media import Media, MediaError
from triton_omni.openai.endpoints import schemas
from triton_omni.openai.endpoints.schemas import ChatMessage, ContentPart
from triton_omni.openai.http.context import RequestContext
from triton_omni.openai.http.errors import invalid, missing
from triton_omni.openai.http.pools import in_thread

MAX_MEDIA = 32
_ADD = {"image": Media.image, "audio": Media.audio, "video": Media.video}


class MessageReader:
    """Reads the messages of one request. `with_video_audio`: videos are read together with their audio.

    Raises ApiError 403 for a model that the key does not allow.
    """

    def __init__(self, context: RequestContext, model: str, *, with_video_audio: bool = False) -> None:
        context.check_model(model)
        self.media = Media(context.share.take)
        self._model = model
        self._with_video_audio = with_video_audio
        self._media_count = 0
        self._services = context.services

    async def read(self, messages: Sequence[ChatMessage], params: Sequence[str] = ()) -> tuple[Message, ...]:
        """All messages. Raises ApiError naming the part. `params` names the messages; else they are `messages[i]`."""
        named = zip(messages, params or [f"messages[{i}]" for i in range(len(messages))], strict=True)
        return tuple([await self._message(message, param) for message, param in named])

    async def _message(self, message: ChatMessage, path: str) -> Message:
        if message.role != "assistant":
            if message.tool_calls:
                raise invalid(f"{path}.tool_calls", "Only messages of the role 'assistant' have tool calls.")
            if message.audio is not None:
                raise invalid(f"{path}.audio", "Only messages of the role 'assistant' refer to earlier audio.")
        if message.role == "tool" and message.tool_call_id is None:
            raise missing(f"{path}.tool_call_id")
        content = await self._content(message, path)
        calls = tuple(msgspec.to_builtins(call) for call in message.tool_calls or ())
        return Message(message.role, content, message.name or "", message.tool_call_id or "", calls)

    async def _content(self, message: ChatMessage, path: str) -> str | tuple[Part, ...]:
        content = message.content
        if message.audio is not None:
            spoken = self._transcript(message.audio.id, f"{path}.audio.id")
            return content if isinstance(content, str) and content else spoken
        if not content and message.role in ("assistant", "tool"):
            return ""  # it called functions, drew images, refused, or said nothing; a function returned nothing
        if content is None:
            raise missing(f"{path}.content")
        if isinstance(content, str):
            return content
        if not content:
            raise invalid(f"{path}.content", f"'{path}.content' must have at least 1 entries (got 0).")
        parts = [await self._parts(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
        return tuple(part for several in parts for part in several)

    def _transcript(self, audio_id: str, param: str) -> str:
        transcript = self._services.transcripts.find(audio_id)
        if transcript is None:
            message = f"There is no audio '{audio_id}', or it has expired; send the text as 'content'."
            raise invalid(param, message, "audio_expired")
        return transcript

    async def _parts(self, part: ContentPart, path: str) -> list[Part]:
        """The part; of a video also its audio, if that was requested."""
        match part:
            case schemas.TextPart():
                return [Part("text", part.text)]
            case schemas.RefusalPart():
                return [Part("text", part.refusal)]
            case _:
                pass
        self._media_count += 1
        if self._media_count > MAX_MEDIA:
            raise invalid(path, f"A request may have {MAX_MEDIA} images, audio clips and videos together.")
        match part:
            case schemas.InputAudioPart():
                return [await self._input_audio(part.input_audio.data, f"{path}.input_audio.data")]
            case schemas.ImageUrlPart():
                return await self._by_url(part.image_url, "image", f"{path}.image_url")
            case schemas.AudioUrlPart():
                return await self._by_url(part.audio_url, "audio", f"{path}.audio_url")
            case schemas.VideoUrlPart():
                return await self._by_url(part.video_url, "video", f"{path}.video_url")

    async def _input_audio(self, data: str, param: str) -> Part:
        await self._services.catalogue.check_media(self._model, "audio", param)
        decode = from_data_url if is_data_url(data) else from_base64
        with media_errors(param, "invalid_audio"):
            content = await in_thread(self._services.pools.media, decode, data)
            return await self._services.pools.decode(self.media.audio, content)

    async def _by_url(self, source: schemas.ImageUrl | schemas.MediaUrl | str, kind: str, path: str) -> list[Part]:
        param = path if isinstance(source, str) else f"{path}.url"
        await self._services.catalogue.check_media(self._model, kind, param)
        with media_errors(param, f"invalid_{kind}_url"):
            data = await self._read(source if isinstance(source, str) else source.url)
        pools = self._services.pools
        add = partial(_ADD[kind], self.media)
        if kind == "image" and await self._services.catalogue.edits(self._model):
            add = partial(self.media.image, alpha="drop")  # as sources of /v1/images/edits
        with media_errors(param, f"invalid_{kind}"):
            parts = [await pools.decode(add, data, is_video=kind == "video")]
            if kind == "video" and self._with_video_audio:
                parts.append(await pools.decode(self.media.video_audio, data, is_video=True))
            return parts

    async def _read(self, url: str) -> bytes:
        pools = self._services.pools
        if is_data_url(url):
            return await in_thread(pools.media, from_data_url, url)
        return await read_url(url, self._services.may_fetch, pools.names)


@contextmanager
def media_errors(param: str, code: str) -> Generator[None]:
    """A MediaError in the body becomes an ApiError about the parameter."""
    try:
        yield
    except MediaError as error:
        raise invalid(param, str(error), code) from None
