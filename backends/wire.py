# SPDX-License-Identifier: Apache-2.0
"""The one contract with clients: tensor names, the request, the events, errors, and the version of all three.

Public model (named after its pipeline), decoupled:

    inputs, all optional, at least `request` or `text_input` must be there
      request      BYTES [1]        a GenerateRequest as JSON
      text_input   BYTES [1]        short form: one user message (or the text to speak, the picture to draw)
      stream       BOOL  [1]        false: exactly one response; default is the request's own `stream`
      audio        FP32  [samples]  mono samples in -1..1; message parts of type "audio" are slices of it
      image        UINT8 [bytes]    RGB pixels; message parts of type "image" are slices with a shape
      video        UINT8 [bytes]    RGB frames; message parts of type "video" are slices with a shape
    outputs, each response carries `event` and what the event is about
      event        BYTES [1]        an Event as JSON
      text_output  BYTES [1]        text: the delta (stream) or the whole (stream=false)
      audio        FP32  [samples]  mono samples in -1..1 at the piece's `sample_rate`
      image        UINT8 [h, w, 3]  RGB pixels

The short form takes its options as Triton request parameters, named as in `SHORT_FORM`; that is what
`/v2/models/<pipeline>/generate` and `/generate_stream` do with unknown JSON keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from triton_omni.backends.core.errors import BadRequest, OmniError, from_line
from triton_omni.backends.core.generate import (
    Deadlines,
    GenerateRequest,
    ImageParams,
    Message,
    Part,
    Sampling,
    SpeechParams,
    TranscriptionParams,
    decode_request,
    encode_request,
)
from triton_omni.backends.core.ids import OPERATOR_KEY, TRACEPARENT, new_request_id
from triton_omni.backends.core.outputs import (
    AudioPiece,
    Candidate,
    FunctionCall,
    ImagePiece,
    OutputPiece,
    TextPiece,
    TokenLogprob,
    TranscriptPiece,
    WordTime,
)

__all__ = [
    "AUDIO",
    "EVENT",
    "IMAGE",
    "OPEN",
    "OPERATOR_KEY",
    "REQUEST",
    "SHORT_FORM",
    "STREAM",
    "TEXT_INPUT",
    "TEXT_OUTPUT",
    "TRACEPARENT",
    "VIDEO",
    "WIRE_VERSION",
    "AudioPiece",
    "BadRequest",
    "Candidate",
    "Deadlines",
    "Event",
    "FunctionCall",
    "GenerateRequest",
    "ImageParams",
    "ImagePiece",
    "Message",
    "OmniError",
    "OutputPiece",
    "Part",
    "PipelineStatus",
    "Progress",
    "RequestStatus",
    "Sampling",
    "SpeechParams",
    "StageStatus",
    "TextPiece",
    "TokenLogprob",
    "TranscriptPiece",
    "TranscriptionParams",
    "WordTime",
    "decode_event",
    "decode_request",
    "encode_event",
    "encode_request",
    "from_line",
    "new_request_id",
    "short_form",
    "text_of",
    "with_stream",
]  # fmt: skip

WIRE_VERSION = 3

REQUEST, TEXT_INPUT, STREAM = "request", "text_input", "stream"
EVENT, TEXT_OUTPUT = "event", "text_output"
AUDIO, IMAGE, VIDEO = "audio", "image", "video"
OPEN = "open"
"""Input of a stage model that only the orchestrator sets: a control Open message, UINT8 [bytes]."""


class Progress(msgspec.Struct, frozen=True):
    """How far a stage without output has come, in a unit of its own: denoising steps, seconds of audio."""

    done: float
    total: float


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The instances of one stage. `state` is that of the best one, "missing" if there is none.

    live     runs of this pipeline in the stage
    ready_s  seconds its worker took to become ready
    """

    state: str = "missing"
    instances: int = 0
    ready: int = 0
    restarts: int = 0
    worker_pids: tuple[int, ...] = ()
    stub_pids: tuple[int, ...] = ()
    ready_s: float = 0.0
    live: int = 0


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is not finished yet.

    phase   "waiting", "opening", "answering" or "ending"
    stages  stages whose runs are open
    pieces  output → pieces sent
    """

    id: str
    operation: str
    age_s: float
    phase: str
    stages: tuple[str, ...]
    pieces: dict[str, int]


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to the operations `health` and `requests`.

    version   WIRE_VERSION of the server
    ready     every stage has a ready instance, and runs can be opened
    live      requests admitted; `queued` wait for admission
    params    typed parameters that the stages take: "image", "speech.voice", …
    about     facts about the model: voices, sample rate, …
    requests  the oldest 100, for operation `requests`
    """

    pipeline: str
    version: int
    ready: bool
    stages: dict[str, StageStatus]
    live: int
    queued: int
    operations: tuple[str, ...]
    params: tuple[str, ...] = ()
    about: dict[str, Any] = {}
    requests: tuple[RequestStatus, ...] = ()


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One response of the public model.

    type           what this response carries; "end" is the last one and arrives together with Triton's FINAL flag
    output, stage  the output ("text", "transcript", "audio", "image") and the stage it came from; on "end" those of the
                   request's own final output; "chunk" is what a directly called stage sends its consumers
    index          counts the responses of one output from 0
    piece          what the response carries, if it carries a piece of an output
    progress       of "progress"
    joined         on the "end" of a request with stream=false: output → all its pieces as one
    counts         beside `joined`: output → number of pieces
    status         of "health"
    aborted        on the "end" of operation "abort": requests that were ended
    outcome        "completed" or "cancelled" (a failure is a Triton error response instead)
    finish_reason  "stop", "length", "tool_calls" or "abort"
    usage          counts: prompt_tokens, completion_tokens, audio_samples, images, …
    timings        seconds since arrival: queue_s, first_<output>_s, total_s
    acknowledge    token: a client that acknowledges sends it back as `target` once it has read this response
    """

    type: Literal["text", "transcript", "audio", "image", "chunk", "progress", "accepted", "end", "health"]
    request_id: str = ""
    output: str = ""
    stage: str = ""
    index: int = 0
    piece: OutputPiece | None = None
    progress: Progress | None = None
    joined: dict[str, OutputPiece] = {}
    counts: dict[str, int] = {}
    status: PipelineStatus | None = None
    aborted: int | None = None
    outcome: str = ""
    finish_reason: str = ""
    usage: dict[str, float] = {}
    timings: dict[str, float] = {}
    acknowledge: str = ""


_event_decoder = msgspec.json.Decoder(Event)
_event_encoder = msgspec.json.Encoder()


def encode_event(event: Event) -> bytes:
    """JSON bytes of an event."""
    return _event_encoder.encode(event)


def text_of(event: Event) -> str | None:
    """The text that a response carries as `text_output`; None if it carries none."""
    piece = event.piece or event.joined.get(TextPiece.kind) or event.joined.get(TranscriptPiece.kind)
    return piece.text if isinstance(piece, TextPiece | TranscriptPiece) else None


def decode_event(data: bytes) -> Event:
    """Event from JSON bytes; raises msgspec.ValidationError for anything else."""
    return _event_decoder.decode(data)


SHORT_FORM: dict[str, tuple[str, type]] = {
    "operation": ("operation", str),
    "modalities": ("modalities", list),
    "voice": ("speech.voice", str),
    "language": ("speech.language", str),
    "speed": ("speech.speed", float),
    "instructions": ("speech.instructions", str),
    "width": ("image.width", int),
    "height": ("image.height", int),
    "steps": ("image.steps", int),
    "priority": ("priority", int),
    "max_tokens": ("sampling.max_tokens", int),
    "temperature": ("sampling.temperature", float),
    "top_p": ("sampling.top_p", float),
    "top_k": ("sampling.top_k", int),
    "seed": ("sampling.seed", int),
    "stop": ("sampling.stop", list),
    "repetition_penalty": ("sampling.repetition_penalty", float),
    "deadline_s": ("deadlines.total_s", float),
    "stages": ("stages", dict),
    "target": ("target", str),
}
"""Request parameter → (place in GenerateRequest, type). Lists are comma-separated text, dicts are JSON text."""

_TENSORS = (REQUEST, TEXT_INPUT, STREAM, AUDIO, IMAGE, VIDEO)
_IGNORED_PARAMETERS = frozenset(
    {"id", "triton_enable_empty_final_response", "binary_data_output", TRACEPARENT, OPERATOR_KEY}
)


def short_form(text: str, parameters: Mapping[str, Any], stream: bool) -> GenerateRequest:
    """The request that `text_input` and request parameters stand for; raises BadRequest naming a bad parameter."""
    fields: dict[str, Any] = {"stream": stream}
    for key, value in parameters.items():
        if key in _IGNORED_PARAMETERS:
            continue
        if key in _TENSORS:
            raise BadRequest(f"'{key}' is an input tensor, no request parameter", key)
        if key not in SHORT_FORM:
            raise BadRequest(f"unknown parameter '{key}'; known: {', '.join(SHORT_FORM)}", key)
        place, kind = SHORT_FORM[key]
        group, _, name = place.rpartition(".")
        target = fields.setdefault(group, {}) if group else fields
        target[name] = _parameter(key, value, kind)
    operation = fields.get("operation", "chat")
    if operation == "chat":
        fields["messages"] = [{"role": "user", "content": text}]
    else:
        fields["input"] = text
    return decode_request(msgspec.json.encode(fields))


def _parameter(key: str, value: Any, kind: type) -> Any:
    try:
        if kind is list:
            return [item for item in str(value).split(",") if item]
        if kind is dict:
            return msgspec.json.decode(str(value), type=dict[str, Any])
        if kind is not str and (isinstance(value, bool) or not math.isfinite(float(value))):
            raise ValueError(value)  # JSON has no word for these: they would turn into "not given"
        if kind is int and int(value) != float(value):
            raise ValueError(value)
        return kind(value)
    except (ValueError, TypeError, ArithmeticError, RecursionError, msgspec.MsgspecError):
        shown = repr(value)[:100]
        raise BadRequest(f"parameter '{key}' must be {kind.__name__}, not {shown}", key) from None


def with_stream(request: GenerateRequest, stream: bool) -> GenerateRequest:
    """The same request with another `stream`."""
    return msgspec.structs.replace(request, stream=stream)
