# SPDX-License-Identifier: Apache-2.0
"""AsyncClient: calls to public models over gRPC, one stream per request, all on one channel."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from triton_omni import failures
from triton_omni.backends import wire
from triton_omni.backends.wire import GenerateRequest, OmniError
from triton_omni.pieces import NO_MEDIA, Piece, inputs_of, is_final, piece_of

CONTROL_TIMEOUT_S = 10.0
"""For calls that no stage works on: health, abort, the list of models."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A public model that the server knows; `reason` says why it is not ready."""

    name: str
    is_ready: bool
    reason: str = ""


class AsyncClient:
    """Calls the pipelines of one server. Use it from one event loop; any number of requests at once.

    address  host:port of Triton's gRPC service
    headers  sent with every call, e.g. the key of restricted APIs
    """

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        self.address = address
        self._headers = dict(headers or {})
        self._triton = aio.InferenceServerClient(address)

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
        """Pieces of the answer as they come; the last has the event "end". Raises OmniError.

        `media` are the tensors that message parts are slices of; client.media.Media makes both.
        `traceparent` is the W3C trace context that the server's spans go on from.
        `request_id` is the id that `abort` ends the request by; without one it gets one, which its events name.
        Closing the iterator (or cancelling the task that waits for it) cancels the request at once.
        """
        call = {
            "model_name": pipeline,
            "inputs": inputs_of(request, media),
            "request_id": request_id or wire.new_request_id(),
        }
        headers = self._headers
        if traceparent:  # the parameter for our spans, the header for Triton's own
            call["parameters"] = {wire.TRACEPARENT: traceparent}
            headers = {**headers, wire.TRACEPARENT: traceparent}
        stream: Any = self._triton.stream_infer(_once(call), stream_timeout=timeout_s, headers=headers)
        del call, media  # an answer can last much longer than its request is worth keeping
        failure: OmniError | None = None
        whole = False
        try:
            async for result, error in stream:  # to its end: cancelling right after FINAL leaks in the 24.10 server
                if error is not None:
                    failure = failures.of_triton(error.message())
                elif failure is None:
                    yield piece_of(result)
                    whole = is_final(result)
            if not whole:
                raise failure or wire.from_line("[unavailable] the server closed the stream before its end")
        except grpc.RpcError as error:
            raise failures.of_grpc(error) from error
        finally:
            stream.cancel()  # does nothing to a call that has ended

    async def abort(self, pipeline: str, request_id: str) -> int:
        """End every live request that has this id; returns how many there were."""
        end = await self._control(pipeline, GenerateRequest(operation="abort", target=request_id))
        return int(end.event.meta.get("aborted", 0))

    async def health(self, pipeline: str) -> dict[str, Any]:
        """The pipeline's own word on its state: ready, stages, live, queued, about. Raises OmniError."""
        return (await self._control(pipeline, GenerateRequest(operation="health"))).event.meta

    async def requests(self, pipeline: str) -> dict[str, Any]:
        """As `health`, with the list of `requests` in work. Raises OmniError."""
        return (await self._control(pipeline, GenerateRequest(operation="requests"))).event.meta

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
        await self._triton.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---
    async def _control(self, pipeline: str, request: GenerateRequest) -> Piece:
        pieces = [piece async for piece in self.generate(pipeline, request, timeout_s=CONTROL_TIMEOUT_S)]
        return pieces[-1]

    async def is_public(self, name: str) -> bool:
        """True for the model of a pipeline, which is configured with one and without a stage. Raises OmniError."""
        answer: Any = await self._ask(self._triton.get_model_config(name, **self._bounds()))
        parameters = answer.config.parameters
        return "pipeline" in parameters and "stage" not in parameters

    def _bounds(self) -> dict[str, Any]:
        return {"headers": self._headers, "client_timeout": CONTROL_TIMEOUT_S}

    async def _ask(self, call: Any) -> Any:
        try:
            return await call
        except InferenceServerException as error:
            raise _unary_failure(error) from error
        except TimeoutError as error:
            raise wire.from_line(f"[unavailable] no answer within {CONTROL_TIMEOUT_S:g} s") from error


async def _once(call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield call


def _is_stage(name: str, models: list[Model]) -> bool:
    """True if a model that is not ready looks like a stage of one of the others: <pipeline>_<stage>."""
    return any(name.startswith(f"{other.name}_") for other in models if other.name != name)


def _unary_failure(error: InferenceServerException) -> OmniError:
    """tritonclient's error of a unary call: "StatusCode.UNAVAILABLE" and words."""
    status = str(error.status()).partition(".")[2]
    if status == "UNAVAILABLE" or "Deadline" in error.message():
        return wire.from_line(f"[unavailable] {error.message()}")
    return failures.of_triton(error.message())
