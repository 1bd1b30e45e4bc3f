# SPDX-License-Identifier: Apache-2.0
"""Reading a request and ending a call: what orchestrator and stage models have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import triton_python_backend_utils as pb

from triton_omni.backends import wire
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.errors import BadRequest, Internal, OmniError, Unavailable
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.triton import tensors
from triton_omni.backends.triton.senders import CancelWatch

log = logging.getLogger("triton_omni.triton")

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def read_request(request: Any, max_bytes: int, optional: bool = False) -> GenerateRequest:
    """The request's JSON, or its short form; raises BadRequest naming the input.

    `optional`: neither may be there (a stage called with tensors alone).
    """
    text = tensors.text_input(request, wire.REQUEST)
    short = tensors.text_input(request, wire.TEXT_INPUT)
    stream = tensors.bool_input(request, wire.STREAM)
    if text is None and short is None and optional:
        return GenerateRequest()
    if (text is None) == (short is None):
        raise BadRequest(f"exactly one of the inputs '{wire.REQUEST}' and '{wire.TEXT_INPUT}' is needed", wire.REQUEST)
    given = text if text is not None else short or ""
    if len(given.encode()) > max_bytes:
        raise BadRequest(f"the request may have {max_bytes} bytes", wire.REQUEST if short is None else wire.TEXT_INPUT)
    extra = tensors.parameters(request)
    if text is None:
        return wire.short_form(given, extra, bool(stream))
    decoded = wire.decode_request(text.encode())
    if stream is not None and stream != decoded.stream:
        decoded = wire.with_stream(decoded, stream)
    return decoded


def event_response(event: wire.Event, carried: Iterable[Tensor] = ()) -> Any:
    """A Triton response with an event and what it carries."""
    outputs = [tensors.text_output(wire.EVENT, wire.encode_event(event))]
    text = wire.text_of(event)
    if text is not None:
        outputs.append(tensors.text_output(wire.TEXT_OUTPUT, text))
    outputs += [tensors.tensor_output(tensor) for tensor in carried]
    return pb.InferenceResponse(outputs)


def error_response(error: OmniError) -> Any:
    """A Triton error response with our wire line and the nearest of Triton's codes."""
    codes = {
        "bad_request": pb.TritonError.INVALID_ARG,
        "not_found": pb.TritonError.NOT_FOUND,
        "too_busy": pb.TritonError.UNAVAILABLE,
        Unavailable.code: pb.TritonError.UNAVAILABLE,
        "cancelled": pb.TritonError.CANCELLED,
    }
    return pb.InferenceResponse(error=pb.TritonError(error.line(), codes.get(error.code, pb.TritonError.INTERNAL)))


def send_last(sender: Any, watch: CancelWatch, publish: Callable[[], None], build: Callable[[], Any]) -> None:
    """End a call with one FINAL, whatever goes wrong on the way. `build` returns the response; None: FINAL alone."""
    watch.forget(sender)  # must come before FINAL, see CancelWatch
    try:
        publish()
    except Exception:  # the Triton border: numbers must not cost a client its end
        log.exception("metrics could not be published")
    try:
        response = build()
    except Exception as error:  # the Triton border: a response that cannot be made is an error, not silence
        log.exception("a last response could not be made")
        response = error_response(Internal(f"{type(error).__name__}: {error}"))
    if response is None:
        sender.send(flags=FINAL)
    else:
        sender.send(response, flags=FINAL)
