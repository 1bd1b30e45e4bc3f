# SPDX-License-Identifier: Apache-2.0
"""What a client of /v1/realtime may send: events, the session's configuration, items. Types only; no I/O."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec import Meta

from triton_omni.openai.endpoints.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Json,
    Names,
    Reasons,
    ResponseTool,
    ResponseToolChoice,
    Seed,
    Temperature,
    Text,
    Url,
    VoiceName,
)
from triton_omni.openai.http.parsing import Strict

Id = Annotated[str, Meta(min_length=1, max_length=512)]
TokenLimit = Annotated[int, Meta(ge=1)] | Literal["inf"]
Modalities = Annotated[list[Literal["text", "audio"]], Meta(min_length=1, max_length=2)]
PCM_HZ = 24_000
"""The rate of the audio both ways."""
NO_DETECTION = "is not supported: this server does not detect turns; set it to null and commit each turn."


class AudioFormat(Strict, kw_only=True):
    """16-bit samples of one channel."""

    type: Literal["audio/pcm"]
    rate: Literal[24000] | None = None


class Transcription(Strict, kw_only=True):
    """`prompt` is guidance that is not used; `model` is one that the pipeline does not choose."""

    ignored_fields: ClassVar[Names] = frozenset({"prompt", "delay", "model"})
    language: Annotated[str, Meta(max_length=64)] | None = None


class AudioInput(Strict, kw_only=True):
    ignored_fields: ClassVar[Names] = frozenset({"noise_reduction"})
    refused_fields: ClassVar[Reasons] = {"turn_detection": NO_DETECTION}
    format: AudioFormat | None = None
    transcription: Transcription | None = None


class AudioOutput(Strict, kw_only=True):
    format: AudioFormat | None = None
    voice: VoiceName | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None


class Audio(Strict, kw_only=True):
    input: AudioInput | None = None
    output: AudioOutput | None = None


class Config(Strict, kw_only=True):
    """What a session and a response may set. `temperature` and `seed` are ours."""

    ignored_fields: ClassVar[Names] = frozenset({"truncation", "tracing", "include", "prompt", "reasoning"})
    output_modalities: Modalities | None = None
    instructions: Text | None = None
    audio: Audio | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None


class SessionConfig(Config, kw_only=True):
    type: Literal["realtime"]
    model: str | None = None


# --- items -----------------------------------------------------------------------------------------------------------
class TextContent(Strict, kw_only=True, tag_field="type", tag="input_text"):
    text: Text


class AudioContent(Strict, kw_only=True, tag_field="type", tag="input_audio"):
    """`audio` as base64."""

    audio: Url
    transcript: Text | None = None


class ImageContent(Strict, kw_only=True, tag_field="type", tag="input_image"):
    image_url: Url
    detail: Literal["auto", "low", "high"] | None = None


class AnsweredText(Strict, kw_only=True, tag_field="type", tag="output_text"):
    text: Text


class AnsweredAudio(Strict, kw_only=True, tag_field="type", tag="output_audio"):
    """Speech of an earlier answer: its words are what the model reads."""

    ignored_fields: ClassVar[Names] = frozenset({"audio"})
    transcript: Text


class SpokenItem(Strict, kw_only=True, tag_field="type", tag="message"):
    ignored_fields: ClassVar[Names] = frozenset({"object", "status"})
    role: Literal["system", "user", "assistant"]
    content: Annotated[
        list[TextContent | AudioContent | ImageContent | AnsweredText | AnsweredAudio],
        Meta(min_length=1, max_length=MAX_MESSAGES),
    ]
    id: Id | None = None


class CallItem(Strict, kw_only=True, tag_field="type", tag="function_call"):
    ignored_fields: ClassVar[Names] = frozenset({"object", "status"})
    name: Text
    arguments: Text
    call_id: Id
    id: Id | None = None


class CallOutputItem(Strict, kw_only=True, tag_field="type", tag="function_call_output"):
    ignored_fields: ClassVar[Names] = frozenset({"object", "status"})
    call_id: Id
    output: Text
    id: Id | None = None


class ItemByReference(Strict, kw_only=True, tag_field="type", tag="item_reference"):
    id: Id


GivenItem = SpokenItem | CallItem | CallOutputItem


class ResponseConfig(Config, kw_only=True):
    """`input`: instead of the conversation's items."""

    conversation: Literal["auto", "none"] | None = None
    input: Annotated[list[GivenItem | ItemByReference], Meta(max_length=MAX_MESSAGES)] | None = None
    metadata: dict[str, str] | None = None


class SecretLife(Strict, kw_only=True):
    """How long a client secret opens sessions, from its creation."""

    anchor: Literal["created_at"] | None = None
    seconds: Annotated[int, Meta(ge=10, le=7200)] | None = None


class ClientSecretBody(Strict, kw_only=True):
    """POST /v1/realtime/client_secrets"""

    expires_after: SecretLife | None = None
    session: SessionConfig | None = None


# --- events ----------------------------------------------------------------------------------------------------------
class ClientEvent(Strict, kw_only=True):
    event_id: Id | None = None


class UpdateSession(ClientEvent, kw_only=True):
    session: SessionConfig


class AppendAudio(ClientEvent, kw_only=True):
    audio: Url


class CommitAudio(ClientEvent, kw_only=True):
    pass


class ClearAudio(ClientEvent, kw_only=True):
    pass


class CreateItem(ClientEvent, kw_only=True):
    """`previous_item_id`: "root" is the beginning; absent: the end."""

    item: GivenItem
    previous_item_id: Id | None = None


class RetrieveItem(ClientEvent, kw_only=True):
    item_id: Id


class DeleteItem(ClientEvent, kw_only=True):
    item_id: Id


class TruncateItem(ClientEvent, kw_only=True):
    item_id: Id
    content_index: Annotated[int, Meta(ge=0)]
    audio_end_ms: Annotated[int, Meta(ge=0)]


class CreateResponse(ClientEvent, kw_only=True):
    response: ResponseConfig | None = None


class CancelResponse(ClientEvent, kw_only=True):
    response_id: Id | None = None


CLIENT_EVENTS: dict[str, type[ClientEvent]] = {
    "session.update": UpdateSession,
    "input_audio_buffer.append": AppendAudio,
    "input_audio_buffer.commit": CommitAudio,
    "input_audio_buffer.clear": ClearAudio,
    "conversation.item.create": CreateItem,
    "conversation.item.retrieve": RetrieveItem,
    "conversation.item.delete": DeleteItem,
    "conversation.item.truncate": TruncateItem,
    "response.create": CreateResponse,
    "response.cancel": CancelResponse,
}


def plain(config: msgspec.Struct) -> Json:
    """What was set, as JSON."""

    def given(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: given(inner) for name, inner in cast(Json, value).items() if inner is not None}
        return value

    return given(msgspec.to_builtins(config))


def merged(config: Json, change: Json) -> Json:
    """A configuration with the fields of another one that are present; `tools` and other lists are replaced."""
    result = dict(config)
    for name, value in change.items():
        old = result.get(name)
        if isinstance(value, dict) and isinstance(old, dict) and name in ("audio", "input", "output"):
            value = merged(cast(Json, old), cast(Json, value))
        elif value is None and name != "transcription":
            continue
        result[name] = value
    return result
