# SPDX-License-Identifier: Apache-2.0
"""Reading a request and answering it: what orchestrator and stage models have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable

import triton_python_backend_utils as pb

from triton_omni.backends import wire
from triton_omni.backends.core.errors import BadRequest, Internal, OmniError, Unavailable, describe
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.responses import Response
from triton_omni.backends.triton import tensors
from triton_omni.backends.triton.senders import CancelWatch, Senders

log = logging.getLogger("triton_omni.triton")

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def read_request(request: pb.InferenceRequest, max_bytes: int, optional: bool = False) -> GenerateRequest:
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
        raise BadRequest(
            f"request must be at most {max_bytes} bytes", wire.REQUEST if short is None else wire.TEXT_INPUT
        )
    extra = tensors.parameters(request)
    if text is None:
        return wire.short_form(given, extra, bool(stream))
    decoded = wire.decode_request(text.encode())
    if stream is not None and stream != decoded.stream:
        decoded = wire.with_stream(decoded, stream)
    return decoded


def event_response(response: Response) -> pb.InferenceResponse:
    """A Triton response with an event, its text and its tensors."""
    outputs = [tensors.text_output(wire.EVENT, wire.encode_event(response.event))]
    text = wire.text_of(response.event)
    if text is not None:
        outputs.append(tensors.text_output(wire.TEXT_OUTPUT, text))
    outputs += [tensors.tensor_output(tensor) for tensor in response.tensors]
    return pb.InferenceResponse(outputs)


def error_response(error: OmniError) -> pb.InferenceResponse:
    """A Triton error response with our wire line and the nearest of Triton's codes."""
    codes = {
        "bad_request": pb.TritonError.INVALID_ARG,
        "not_found": pb.TritonError.NOT_FOUND,
        "too_busy": pb.TritonError.UNAVAILABLE,
        Unavailable.code: pb.TritonError.UNAVAILABLE,
        "cancelled": pb.TritonError.CANCELLED,
    }
    return pb.InferenceResponse(error=pb.TritonError(error.line(), codes.get(error.code, pb.TritonError.INTERNAL)))


class TritonResponseStream:
    """core.responses.ResponseStream over one Triton request. One sender thread sends its responses in order."""

    def __init__(
        self, request: pb.InferenceRequest, senders: Senders, watch: CancelWatch, publish: Callable[[], None]
    ) -> None:
        """`publish` brings the metrics up to date before the last response."""
        self._sender = request.get_response_sender()
        self._queue = senders.queue()
        self._watch = watch
        self._publish = publish

    def watch(self, gone: Callable[[], None]) -> None:
        self._watch.watch(self._sender, gone)

    def acknowledge(self) -> None:
        self._queue(lambda: self._sender.send(pb.InferenceResponse([])))

    def send(
        self, response: Response, failed: Callable[[OmniError], None], sent: Callable[[], None] | None = None
    ) -> None:
        def job() -> None:
            try:
                self._sender.send(event_response(response))
            except Exception as error:  # Triton boundary: a response that cannot be sent ends its call
                log.exception("a response could not be sent")
                failed(Internal(describe(error)))
            finally:
                if sent is not None:
                    sent()

        self._queue(job)

    def publish(self) -> None:
        self._queue(self._publish)

    def end(self, last: Response | OmniError | None, sent: Callable[[], None] | None = None) -> None:
        def job() -> None:
            try:
                self._end(last)
            finally:
                if sent is not None:
                    sent()

        self._queue(job)

    def _end(self, last: Response | OmniError | None) -> None:
        """Send one FINAL, whatever goes wrong on the way."""
        self._watch.forget(self._sender)  # must come before FINAL, see CancelWatch
        try:
            self._publish()
        except Exception:  # Triton boundary: an error in metrics must not cost a client its end
            log.exception("metrics could not be published")
        if last is None:
            self._sender.send(flags=FINAL)
            return
        try:
            response = error_response(last) if isinstance(last, OmniError) else event_response(last)
        except Exception as error:  # Triton boundary: a response that cannot be made is an error
            log.exception("a last response could not be made")
            response = error_response(Internal(describe(error)))
        self._sender.send(response, flags=FINAL)
