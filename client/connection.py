# SPDX-License-Identifier: Apache-2.0
"""AsyncClient: calls to public models over gRPC, one stream per request, all on one channel."""

# tritonclient has no types
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import msgspec
import numpy as np
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from triton_omni import failures
from triton_omni.backends import wire
from triton_omni.backends.wire import GenerateRequest, OmniError
from triton_omni.pieces import NO_MEDIA, Piece, inputs_of, is_final, piece_of

T = TypeVar("T")
log = logging.getLogger("triton_omni.client")

KEY_METADATA = "triton-grpc-protocol-triton-omni-key"
"""Metadata with the operator's key for Triton's own restricted APIs."""
KEYED_OPERATIONS = frozenset({"abort", "requests"})
KEPT_TOKENS = 1024
CONTROL_TIMEOUT_S = 10.0
"""For calls that no stage works on: health, abort, acknowledge, the list of models."""
RETRY_S = 0.5
"""Between two tries to acknowledge what was read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A public model that the server knows; `reason` says why it is not ready."""

    name: str
    is_ready: bool
    reason: str = ""


class AsyncClient:
    """Calls the pipelines of one server. Use it from one event loop; any number of requests at once.

    address  host:port of Triton's gRPC service
    headers  sent with every call
    key      the operator's key: for the list of models, `requests`, and to abort any request
    """

    def __init__(self, address: str, headers: Mapping[str, str] | None = None, key: str = "") -> None:
        self.address = address
        self._headers = {**(headers or {}), **({KEY_METADATA: key} if key else {})}
        self._key = key
        self._tokens: dict[tuple[str, str], str] = {}
        self._triton = aio.InferenceServerClient(address)
        self._acknowledging: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        pipeline: str,
        request: GenerateRequest,
        *,
        media: Mapping[str, np.ndarray] = NO_MEDIA,
        request_id: str | None = None,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of the answer as they arrive; the last has the event "end". Raises OmniError.

        media        the tensors that message parts are slices of; `triton_omni.Media` makes both
        traceparent  W3C trace context, the parent of the server's spans
        request_id   the id to `abort` the request by; without one a new one is made, which the events carry
        Closing the iterator (or cancelling the task that waits for it) cancels the request at once. A piece counts as
        read when the next one is asked for: the server sends only a bounded number of bytes ahead.
        """
        request = msgspec.structs.replace(request, acknowledge=request.stream)
        own = pipeline, request_id or wire.new_request_id()
        parameters = {wire.OPERATOR_KEY: self._key} if self._key and request.operation in KEYED_OPERATIONS else {}
        headers = self._headers
        if traceparent:  # the parameter for our spans, the header for Triton's own
            parameters[wire.TRACEPARENT] = traceparent
            headers = {**headers, wire.TRACEPARENT: traceparent}
        call: dict[str, object] = {
            "model_name": pipeline,
            "inputs": inputs_of(request, media),
            "request_id": own[1],
            "parameters": parameters or None,
        }
        stream: Any = self._triton.stream_infer(_once(call), stream_timeout=timeout_s, headers=headers)
        del call, media  # an answer can last much longer than its request is worth keeping
        failure: OmniError | None = None
        whole = False
        receipts = _Receipts(partial(self._acknowledge, pipeline), self._acknowledging)
        try:
            async for result, error in stream:  # to its end: cancelling right after FINAL leaks in the 24.10 server
                if error is not None:
                    failure = failures.of_triton(error.message())
                elif failure is None:
                    piece = piece_of(result)
                    if piece.event.token:
                        self._remember(own, piece.event.token)
                    yield piece
                    receipts.add(piece.event.acknowledge)
                    whole = is_final(result)
            if not whole:
                raise failure or wire.from_line("[unavailable] the server closed the stream before its end")
        except grpc.RpcError as error:
            raise failures.of_grpc(error) from error
        finally:
            receipts.close()
            stream.cancel()  # does nothing to a call that has ended

    def _remember(self, own: tuple[str, str], token: str) -> None:
        if len(self._tokens) == KEPT_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        self._tokens[own] = token

    async def abort(self, pipeline: str, request_id: str, token: str = "") -> int:
        """End the live request with this id; returns how many were ended. Raises OmniError.

        `token` is that of the request's first event. For the latest requests of this client it is known from then on.
        With the operator's key it ends every request that has the id, without a token.
        """
        token = token or self._tokens.get((pipeline, request_id), "")
        end = await self._control(pipeline, GenerateRequest(operation="abort", target=request_id, token=token))
        return end.event.aborted or 0

    async def append(self, pipeline: str, token: str, text: str, *, ends: bool = False) -> None:
        """Add text to the input of a request with `open_input`; `ends`: nothing follows. Raises OmniError.

        `token` is that of the request's first event, which comes at once. One call at a time keeps the order.
        """
        request = GenerateRequest(operation="append", token=token, input=text, ends_input=ends)
        await self._control(pipeline, request)

    async def health(self, pipeline: str) -> dict[str, Any]:
        """State of the pipeline: ready, stages, live, queued, about. Raises OmniError."""
        return await self._status(pipeline, "health")

    async def requests(self, pipeline: str, request_id: str = "") -> dict[str, Any]:
        """As `health`, with a list of running requests; needs the operator's key. Raises OmniError.

        request_id  also the `traces` of ended requests with this id, of the pipeline's latest 256
        """
        return await self._status(pipeline, "requests", request_id)

    async def _status(self, pipeline: str, operation: str, target: str = "") -> dict[str, Any]:
        answer = await self._control(pipeline, GenerateRequest(operation=operation, target=target))
        return msgspec.to_builtins(answer.event.status)

    async def models(self) -> list[Model]:
        """Public models in the server's repository, ready or not. Raises OmniError, also if the index is restricted."""
        index: Any = await self._ask(self._triton.get_model_repository_index(**self._bounds()))
        found: list[Model] = []
        for entry in index.models:
            if entry.state != "READY":
                found.append(Model(entry.name, False, entry.reason or entry.state or "not loaded"))
            elif await self.is_public(entry.name):
                found.append(Model(entry.name, True))
        return [m for m in found if m.is_ready or not _is_stage(m.name, found)]

    async def is_live(self) -> bool:
        """True if the server answers."""
        try:
            return bool(await self._ask(self._triton.is_server_live(**self._bounds())))
        except OmniError:
            return False

    async def close(self) -> None:
        """End the channel; open requests are cancelled."""
        await asyncio.gather(*self._acknowledging)
        await self._triton.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---
    async def _acknowledge(self, pipeline: str, token: str) -> None:
        await self._control(pipeline, GenerateRequest(operation="acknowledge", target=token))

    async def _control(self, pipeline: str, request: GenerateRequest) -> Piece:
        pieces = [piece async for piece in self.generate(pipeline, request, timeout_s=CONTROL_TIMEOUT_S)]
        return pieces[-1]

    async def is_public(self, name: str) -> bool:
        """True for the public model of a pipeline: its parameters name a pipeline but no stage. Raises OmniError."""
        answer: Any = await self._ask(self._triton.get_model_config(name, **self._bounds()))
        parameters = answer.config.parameters
        return "pipeline" in parameters and "stage" not in parameters

    def _bounds(self) -> dict[str, Any]:
        return {"headers": self._headers, "client_timeout": CONTROL_TIMEOUT_S}

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except InferenceServerException as error:
            raise _unary_failure(error) from error
        except TimeoutError as error:
            raise wire.from_line(f"[unavailable] no answer within {CONTROL_TIMEOUT_S:g} s") from error


class _Receipts:
    """Tells the server what the consumer of one answer has read: one side call at a time, for the latest piece."""

    def __init__(self, send: Callable[[str], Coroutine[Any, Any, None]], tasks: set[asyncio.Task[None]]) -> None:
        """`tasks` has the task of the call while there is one."""
        self._send = send
        self._tasks = tasks
        self._token = ""
        self._is_sending = False

    def add(self, token: str) -> None:
        """The consumer has read the piece with this token; an empty token asks for no receipt."""
        if token:
            self._token = token
            if not self._is_sending:
                self._is_sending = True
                task = asyncio.create_task(self._run())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """The answer is over: a call on its way may end, none is repeated."""
        self._token = ""

    async def _run(self) -> None:
        while token := self._token:
            try:
                await self._send(token)
            except OmniError as error:  # the server waits for a receipt: try again while the answer lasts
                log.debug("acknowledgment failed: %s", error.line())
                await asyncio.sleep(RETRY_S)
            else:
                self._token = self._token if self._token != token else ""
        self._is_sending = False


async def _once(call: dict[str, object]) -> AsyncIterator[dict[str, object]]:
    yield call


def _is_stage(name: str, models: list[Model]) -> bool:
    """True if a model that is not ready looks like a stage of one of the others: <pipeline>_<stage>."""
    return any(name.startswith(f"{other.name}_") for other in models if other.name != name)


def _unary_failure(error: InferenceServerException) -> OmniError:
    """Our error for tritonclient's error of a unary call, whose status is text such as "StatusCode.UNAVAILABLE"."""
    status = str(error.status()).partition(".")[2]
    if status == "UNAVAILABLE" or "Deadline" in error.message():
        return wire.from_line(f"[unavailable] {error.message()}")
    return failures.of_triton(error.message())
