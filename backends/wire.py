# SPDX-License-Identifier: Apache-2.0
"""The one contract with clients: tensor names, the request, the events, errors, and the version of all three.

Public model (named after its pipeline), decoupled:

    inputs, all optional, at least `request` or `text_input` must be there
      request      BYTES [1]        a `GenerateRequest` as JSON, see below
      text_input   BYTES [1]        short form: one user message, or the text to speak or draw (`operation`); options
                                    are request parameters
      stream       BOOL  [1]        false: exactly one response, with everything joined; not sent: the request's own
                                    `stream`, and false with `text_input`
      audio        FP32  [samples]  mono samples in -1..1; message parts of type `audio` are slices of it
      image        UINT8 [bytes]    RGB pixels, row by row; message parts of type `image` are slices with a shape
      video        UINT8 [bytes]    RGB frames; message parts of type `video` are slices with a shape
    outputs, each response carries `event` and what the event is about
      event        BYTES [1]        an `Event` as JSON, see below
      text_output  BYTES [1]        text: what is new (stream), or the whole (`stream` false, with the end)
      audio        FP32  [samples]  mono samples in -1..1 at the piece's `sample_rate`
      image        UINT8 [h, w, 3]  RGB pixels: height, width, 3
    input of stage models, of the orchestrator alone
      open         UINT8 [bytes]    a control `OpenMessage`; answered at once by an empty response, FINAL comes when the
                                    run has ended

The short form takes its options as Triton request parameters, named as in `SHORT_FORM`; that is what
`/v2/models/<pipeline>/generate` and `/generate_stream` do with unknown JSON keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from triton_omni.backends.core.errors import BadRequest, OmniError, from_line
from triton_omni.backends.core.generate import (
    WIRE_VERSION,
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
    SegmentDecoding,
    TextPiece,
    TokenLogprob,
    TranscriptPiece,
    WordsPiece,
    WordTime,
)
from triton_omni.backends.core.responses import Event, PipelineStatus, Progress, RequestStatus, StageStatus

__all__ = [
    "AUDIO", "EVENT", "IMAGE", "OPEN", "OPERATOR_KEY", "REQUEST", "SHORT_FORM", "STREAM", "TEXT_INPUT",
    "TEXT_OUTPUT", "TRACEPARENT", "VIDEO", "WIRE_VERSION", "AudioPiece", "BadRequest", "Candidate", "Deadlines",
    "Event", "FunctionCall", "GenerateRequest", "ImageParams", "ImagePiece", "Message", "OmniError", "OutputPiece",
    "Part", "PipelineStatus", "Progress", "RequestStatus", "Sampling", "SegmentDecoding", "SpeechParams",
    "StageStatus", "TextPiece", "TokenLogprob", "TranscriptPiece", "TranscriptionParams", "WordTime",
    "WordsPiece", "decode_event", "decode_request", "encode_event", "encode_request", "from_line", "new_request_id",
    "short_form", "text_of", "with_stream",
]  # fmt: skip

REQUEST, TEXT_INPUT, STREAM = "request", "text_input", "stream"
EVENT, TEXT_OUTPUT = "event", "text_output"
AUDIO, IMAGE, VIDEO = "audio", "image", "video"
OPEN = "open"
"""Input of a stage model that only the orchestrator sets: a control Open message, UINT8 [bytes]."""


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
    "token": ("token", str),
}
"""Request parameter → (place in GenerateRequest, type). Lists are comma-separated text, dicts are JSON text."""

_TENSORS = (REQUEST, TEXT_INPUT, STREAM, AUDIO, IMAGE, VIDEO)
_IGNORED_PARAMETERS = frozenset(
    {"id", "triton_enable_empty_final_response", "binary_data_output", TRACEPARENT, OPERATOR_KEY}
)


def short_form(text: str, parameters: Mapping[str, object], stream: bool) -> GenerateRequest:
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
