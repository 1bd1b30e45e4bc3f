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
WIRE_VERSION = 3
"""Changes with every incompatible change of what docs/wire.md describes."""
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class Part(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One piece of a message: text, or a slice of the request's media tensor of the same name as `type`.

    type         a kind that the pipeline does not take is refused (`about.media` of `health` lists them)
    text         the text of a text part
    offset       where the slice starts in the tensor of the same name: samples (audio) or bytes; slices do not overlap
    length       audio: number of samples
    sample_rate  audio: samples per second; needed; most pipelines take 4,000 to 192,000
    shape        image, video: the slice's shape, all sizes positive; an image of height, width is the mask of an
                 `edit`, 128 and more where the image may change
    fps          video: images per second; 0 or not sent: what the model assumes. One value for all videos of a
                 request
    in_video     audio: it is the audio track of the video part right before it, to be read together with it
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
    """One turn of a chat.

    role          who speaks
    content       text, or a list of `Part`
    name          name of the speaker
    tool_call_id  the call that a `tool` message answers
    tool_calls    calls an `assistant` message made
    """

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
    """How tokens are chosen; None means the stage's deploy default.

    max_tokens          what does not fit into the model's context after the prompt is cut
    temperature         0 is greedy
    top_p               smallest set of tokens with this probability
    top_k               -1 or 0: off
    min_p               least probability, relative to the best token's
    seed                repeats the same tokens; beside other runs for certain only where the stage is `batch_invariant`
    stop                texts that end the output
    repetition_penalty  1 is none
    frequency_penalty   per earlier use of a token
    presence_penalty    once for a token that was used
    logit_bias          token id (as text) → bias
    logprobs            how many of the best tokens to report
    ignore_eos          go on until `max_tokens`
    json_schema         the text must be JSON of this schema; up to 64 Ki characters, 500 properties of an object (40
                        where `minProperties` or `maxProperties` counts them), lengths of 100,000, patterns that repeat
                        1000 parts (the same for `tools` that must be called)
    """

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
    """Time bounds in seconds; 0 disables one, None takes the deploy value.

    queue_s         longest wait for admission (place in the error: `queue`)
    first_output_s  from admission to the first piece of output (place in the error: `first output of <stage>`)
    stall_s         longest silence, of the request after its first output and of any edge and of a client that
                    acknowledges (place in the error: `<stage>-><stage>`, `stall of <stage>` for the last one, `client`)
    total_s         from arrival to end (place in the error: `total`)
    """

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

    width            pixels
    height           pixels
    steps            denoising steps
    guidance_scale   for guidance-distilled models; reported as not applied by others
    true_cfg_scale   classifier-free guidance against the negative prompt; 1 or less switches it off
    negative_prompt  what should not be in the image
    seed             overrides `sampling.seed`; same seed, same image
    n                images per request
    partial_images   exact previews, evenly spread over the steps
    preview_every    approximate previews instead, one per this many steps
    lora             an adapter of the deploy file; empty: none
    lora_scale       strength of the adapter
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

    voice         one of the pipeline's voices
    language      one of the pipeline's languages
    speed         speaking rate; 1 is normal
    instructions  how to speak, in words
    """

    voice: str | None = None
    language: str | None = None
    speed: Annotated[float, msgspec.Meta(ge=0.25, le=4)] = 1.0
    instructions: str = ""


class TranscriptionParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How audio is transcribed. `word_timestamps` adds the times of single words to every segment.

    language         language of the audio
    word_timestamps  also the start and end of every word
    """

    language: str | None = None
    word_timestamps: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One client call to a pipeline. Unknown keys are refused, so a typo never passes silently.

    operation      one of the pipeline's operations (`chat`, `completion`, `speech`, `transcription`, `image`, `edit`),
                   or `health`, `requests`, `abort`, `acknowledge` or `append`
    messages       the chat so far, see `Message`; for `edit` its last user message has the images, perhaps a mask,
                   and the text
    input          the text to continue or to speak, or the description of the image (`completion`, `speech`, `image`)
    modalities     outputs wanted: `text`, `transcript`, `audio`, `words`, `image`; only stages that lead to one of
                   them are opened
    sampling       how tokens are chosen, see `Sampling`
    image          how images are made, see `ImageParams`
    speech         how the audio output is spoken, see `SpeechParams`
    transcription  how audio is transcribed, see `TranscriptionParams`
    tools          function tools, as OpenAI describes them
    tool_choice    `auto`: the model decides; `required`: one call or more and no other text; else the name of the one
                   function to call
    stages         options for single stages by stage name; each stage knows its own keys
    deadlines      see `Deadlines`
    priority       the higher waits less for admission
    stream         false: exactly one response
    target         operation `abort`: every request with this id is ended; answered by an `end` with `aborted`.
                   Operation `acknowledge`: the token of the event that was read. Operation `requests`: also show
                   the traces of ended requests with this id
    token          operations `abort` and `append`: the `token` of the request's first event; for an abort the
                   operator's key does as well
    open_input     the input goes on: `append` brings more of it while the answer comes ("Input that streams")
    ends_input     operation `append`: nothing follows this input
    acknowledge    this client acknowledges what it has read of the stream when an event asks for it ("Slow clients")
    version        WIRE_VERSION that the client was written for; 0 is not said
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
    token: str = ""
    open_input: bool = False
    ends_input: bool = False
    acknowledge: bool = False
    version: int = 0

    def media(self) -> frozenset[str]:
        """Kinds of media the messages refer to ("audio", "image", "video")."""
        return frozenset(p.type for m in self.messages for p in m.parts if p.type != "text")

    def params(self) -> tuple[str, ...]:
        """The typed parameters that differ from their defaults: "image.width", "speech.voice", …"""
        parts = {
            "image": (self.image, ImageParams()),
            "speech": (self.speech, SpeechParams()),
            "transcription": (self.transcription, TranscriptionParams()),
        }
        return tuple(  # by value: msgspec omits a default number only if it is the very same object
            f"{name}.{field}"
            for name, (part, default) in parts.items()
            for field in part.__struct_fields__
            if getattr(part, field) != getattr(default, field)
        )


Options = TypeVar("Options", bound=msgspec.Struct)

_decoder = msgspec.json.Decoder(GenerateRequest)
_encoder = msgspec.json.Encoder()


def decode_request(data: bytes) -> GenerateRequest:
    """Request from JSON bytes; raises BadRequest naming the field."""
    try:
        request = _decoder.decode(data)
    except msgspec.ValidationError as error:
        message, field = blamed(error)
        raise BadRequest(message, field or "request") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not valid JSON: {error}", "request") from None
    if request.version not in (0, WIRE_VERSION):
        raise BadRequest(f"wire version must be {WIRE_VERSION} (got {request.version})", "version")
    return request


def stage_options(given: Mapping[str, object], kind: type[Options], stage: str) -> Options:
    """A request's own options for one stage as `kind`; raises BadRequest naming the key."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        message, key = blamed(error)
        hint = nearest_key(message, kind.__struct_fields__)
        raise BadRequest(message + hint, f"stages.{stage}.{key}".rstrip(".")) from None


def with_stage_options(params: Options, given: Mapping[str, object], stage: str) -> Options:
    """`params` with a request's own options for one stage on top; raises BadRequest naming the key."""
    return stage_options({**msgspec.to_builtins(params), **given}, type(params), stage) if given else params


def encode_request(request: GenerateRequest) -> bytes:
    """JSON bytes of a request; the inverse of `decode_request`."""
    return _encoder.encode(request)
