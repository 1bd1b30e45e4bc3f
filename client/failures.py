# SPDX-License-Identifier: Apache-2.0
"""Errors of Triton and gRPC → our errors."""

from __future__ import annotations

import grpc

from triton_omni.backends import wire
from triton_omni.backends.wire import BadRequest, OmniError

_TRITON_MESSAGES = (
    ("no available versions", "unavailable"),  # known but not loaded: starting or stopping
    ("unknown model", "not_found"),
    ("is not found", "not_found"),
    ("is not ready", "unavailable"),
    ("Server is stopping", "unavailable"),
    ("restricted", "unavailable"),
)
_GRPC_CODES = {
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.NOT_FOUND: "not_found",
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline_exceeded:client",
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest.code,
    grpc.StatusCode.RESOURCE_EXHAUSTED: BadRequest.code,  # a message larger than gRPC takes
}


def of_triton(message: str) -> OmniError:
    """Error of a response: the text is one of our wire lines or Triton's own message."""
    if message.startswith("["):
        return wire.from_line(message)
    code = next((code for text, code in _TRITON_MESSAGES if text in message), "internal")
    return wire.from_line(f"[{code}] {message}")


def of_grpc(error: grpc.RpcError) -> OmniError:
    """Error of a call that gRPC itself ended."""
    if not isinstance(error, grpc.Call):  # grpc.aio's errors are not, though they have the same two methods
        assert isinstance(error, grpc.aio.AioRpcError)
    details = str(error.details() or "")
    if details.startswith("["):
        return wire.from_line(details)
    code = _GRPC_CODES.get(error.code(), "internal")
    return wire.from_line(f"[{code}] {details or error.code().name}")
