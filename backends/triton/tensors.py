# SPDX-License-Identifier: Apache-2.0
"""Triton tensors ⇄ ours."""

from __future__ import annotations

import hmac
import json
import os

import numpy as np
import triton_python_backend_utils as pb

from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.ids import OPERATOR_KEY, TRACEPARENT


def self_check() -> None:
    """Refuse to load where the stub would read numpy arrays wrong.

    Measured: the stub of the 24.10 server, with numpy 2, reads zeros out of numeric inputs without any error, while
    everything that can be tried before the first request looks right. So the versions decide: NVIDIA's images name
    their release in NVIDIA_TRITON_SERVER_VERSION, and those of 25 and later are built for numpy 2; the local server
    names none.
    """
    release = os.environ.get("NVIDIA_TRITON_SERVER_VERSION", "")
    if int(np.__version__.partition(".")[0]) >= 2 and not release.partition(".")[0] >= "25":
        raise RuntimeError(
            f"this Triton stub cannot read arrays of numpy {np.__version__}; give the stub an environment with "
            "numpy 1.26 (`make setup` does), or use a server image of 26.07 or later"
        )


def text_input(request: pb.InferenceRequest, name: str) -> str | None:
    """A BYTES [1] input as text; None if it was not sent."""
    array = _input(request, name)
    if array is None:
        return None
    if array.size != 1:
        raise BadRequest(f"input '{name}' must have exactly one element, not {array.size}", name)
    value = array.reshape(-1)[0]
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise BadRequest(f"input '{name}' is not UTF-8", name) from None


def bool_input(request: pb.InferenceRequest, name: str) -> bool | None:
    """A BOOL [1] input; None if it was not sent."""
    array = _input(request, name)
    if array is None:
        return None
    if array.size != 1:
        raise BadRequest(f"input '{name}' must have exactly one element, not {array.size}", name)
    return bool(array.reshape(-1)[0])


def bytes_input(request: pb.InferenceRequest, name: str) -> bytes | None:
    """A UINT8 [n] input as bytes; None if it was not sent."""
    array = _input(request, name)
    return None if array is None else array.tobytes()


def tensor_input(request: pb.InferenceRequest, name: str) -> Tensor | None:
    """A numeric input as one of our tensors. Its bytes are its own: `as_numpy` copies them out of Triton's memory."""
    array = _input(request, name)
    return None if array is None else Tensor.of(name, np.ascontiguousarray(array))


def parameters(request: pb.InferenceRequest) -> dict[str, object]:
    """The request's parameters."""
    text = request.parameters()
    return json.loads(text) if text else {}


def has_key(request: pb.InferenceRequest, key: str) -> bool:
    """True if the request's parameters hold the operator's key."""
    return hmac.compare_digest(str(parameters(request).get(OPERATOR_KEY, "")).encode(), key.encode())


def traceparent(request: pb.InferenceRequest) -> str:
    """The W3C context to go on from: Triton's own span where it traces (`--trace-config mode=opentelemetry`), else
    the request's parameter.
    """
    context = request.trace().get_context()
    return str((json.loads(context) if context else parameters(request)).get(TRACEPARENT, ""))


def text_output(name: str, value: str | bytes) -> pb.Tensor:
    """A BYTES [1] output."""
    data = value.encode("utf-8") if isinstance(value, str) else value
    return pb.Tensor(name, np.array([data], dtype=np.object_))


def tensor_output(tensor: Tensor) -> pb.Tensor:
    """An output over one of our CPU tensors; its bytes are read when the response is sent."""
    array = np.frombuffer(tensor.data, dtype=tensor.spec.dtype).reshape(tensor.spec.shape)
    return pb.Tensor(tensor.name, array)


def _input(request: pb.InferenceRequest, name: str) -> np.ndarray | None:
    tensor = pb.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()
