# SPDX-License-Identifier: Apache-2.0
"""The request as every stage sees it: decoded once at the border, immutable from then on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.hints import blamed, nearest_key

MAX_REQUEST_ID_CHARS = 256
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class Part(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One piece of a message: text, or a slice of the request's media tensor of the same name as `type`.

    For audio `offset` and `length` count samples; for image and video they count bytes and `shape` is the
    slice's shape. `fps` says how many pictures of a video stand for a second, 0 leaves it to the model; audio with
    `in_video` is the sound of the video part right before it. An image of height, width is a mask:
    128 and more where an edit may change the picture.
    """

    type: Literal["text", "audio", "image", "video"]
    text: str = ""
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    length: Annotated[int, msgspec.Meta(ge=0)] = 0
    sample_rate: Annotated[int, msgspec.Meta(ge=0, le=384_000)] = 0
    shape: tuple[int, ...] = ()
    fps: Annotated[float, msgspec.Meta(ge=0, le=240)] = 0.0
    in_video: bool = False


class Message(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[Part, ...] = ""
    name: str = ""
    tool_call_id: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The content as parts, whatever form it came in."""
        return (Part("text", self.content),) if isinstance(self.content, str) else self.content


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How tokens are chosen; None means the stage's deploy default."""

    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: tuple[str, ...] = ()
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] = {}
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    ignore_eos: bool = False
    json_schema: dict[str, Any] | None = None


class Deadlines(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Time bounds in seconds; 0 disables one, None takes the deploy value."""

    queue_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    first_output_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    stall_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    total_s: Annotated[float, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number of seconds")


class ImageParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How images are made; None means the stage's deploy default.

    width, height    pixels
    steps            denoising steps
    guidance_scale   for guidance-distilled models; reported as not applied by others
    true_cfg_scale   classifier-free guidance against the negative prompt; 1 or less switches it off
    seed             overrides `sampling.seed`
    n                images per request
    partial_images   exact previews, evenly spread over the steps
    preview_every    approximate previews instead, one per this many steps
    lora, lora_scale an adapter of the deploy file and its strength; "" selects none
    step_cache       skip parts of steps where little changes; approximate, and the run is not batched
    """

    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    n: int = 1
    partial_images: int = 0
    preview_every: int = 0
    lora: str | None = None
    lora_scale: float = 1.0
    step_cache: bool = False


class SpeechParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the audio output is spoken; None means the pipeline's default.

    speed         speaking rate, relative to normal
    instructions  how to speak, in words
    """

    voice: str | None = None
    language: str | None = None
    speed: Annotated[float, msgspec.Meta(ge=0.25, le=4)] = 1.0
    instructions: str = ""


class TranscriptionParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How audio is transcribed. `word_timestamps` adds the times of single words to every segment."""

    language: str | None = None
    word_timestamps: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One client call to a pipeline. Unknown keys are refused, so a typo never passes silently.

    operation   what to do: one of the pipeline's operations ("chat", "speech", "transcription", "image",
                "edit"), or "health", "requests", "abort" or "acknowledge"
    messages    the chat so far (operation "chat"); pictures, perhaps a mask, and text (operation "edit")
    input       the text to speak or the picture's description (operations "speech" and "image")
    modalities  outputs wanted ("text", "audio", "image"); empty means the operation's default
    image, speech, transcription  parameters of one kind of output, for the stages that declare to take them
    tool_choice "auto", "required", or the name of the one function to call
    stages      options for single stages, by stage name; each stage knows its own keys
    target      the request id to end (operation "abort"), or the token of the event that was read ("acknowledge")
    acknowledge  the client of this stream acknowledges what it has read when an event asks for it
    """

    operation: str = "chat"
    messages: tuple[Message, ...] = ()
    input: str = ""
    modalities: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    image: ImageParams = ImageParams()
    speech: SpeechParams = SpeechParams()
    transcription: TranscriptionParams = TranscriptionParams()
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    stages: dict[str, dict[str, Any]] = {}
    deadlines: Deadlines = Deadlines()
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    stream: bool = True
    target: str = ""
    acknowledge: bool = False

    def media(self) -> frozenset[str]:
        """Kinds of media the messages refer to ("audio", "image", "video")."""
        return frozenset(p.type for m in self.messages for p in m.parts if p.type != "text")

    def params(self) -> tuple[str, ...]:
        """The typed parameters that differ from their defaults: "image.width", "speech.voice", …"""
        parts = {"image": self.image, "speech": self.speech, "transcription": self.transcription}
        return tuple(f"{name}.{field}" for name, part in parts.items() for field in msgspec.to_builtins(part))


Options = TypeVar("Options", bound=msgspec.Struct)

_decoder = msgspec.json.Decoder(GenerateRequest)
_encoder = msgspec.json.Encoder()


def decode_request(data: bytes) -> GenerateRequest:
    """Request from JSON bytes; raises BadRequest naming the field."""
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError as error:
        message, field = blamed(error)
        raise BadRequest(message, field or "request") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not valid JSON: {error}", "request") from None


def stage_options(given: Mapping[str, Any], kind: type[Options], stage: str) -> Options:
    """A request's own options for one stage as `kind`; raises BadRequest naming the key."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        message, key = blamed(error)
        hint = nearest_key(message, kind.__struct_fields__)
        raise BadRequest(message + hint, f"stages.{stage}.{key}".rstrip(".")) from None


def with_stage_options(params: Options, given: Mapping[str, Any], stage: str) -> Options:
    """`params` with a request's own options for one stage on top; raises BadRequest naming the key."""
    return stage_options({**msgspec.to_builtins(params), **given}, type(params), stage) if given else params


def encode_request(request: GenerateRequest) -> bytes:
    """JSON bytes of a request; the inverse of `decode_request`."""
    return _encoder.encode(request)
