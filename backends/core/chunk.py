# SPDX-License-Identifier: Apache-2.0
"""What crosses an edge: a chunk of named tensors, and what they are a piece of.

A tensor's bytes are whatever speaks Python's buffer protocol (numpy array, memoryview, bytes) on the CPU, or an
object with `__cuda_array_interface__` over bytes (uint8) on a GPU. Importing this module needs neither numpy nor
torch; `Tensor.torch` and `Tensor.of_torch` are for engines and import it when called.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from triton_omni.backends.core.outputs import OutputPiece, PieceBase

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor as TorchTensor

AnyPiece = TypeVar("AnyPiece", bound=PieceBase)
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip

_dtype_name = functools.cache(str)  # numpy makes the name each time, slowly


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, numpy dtype name and shape of a tensor; -1 stands for a free dimension in a declaration."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Tensor(msgspec.Struct, frozen=True):
    """One named tensor. `data` is contiguous, C order, exactly `spec.nbytes` long; `device` is "cpu" or "cuda:N"."""

    spec: TensorSpec
    data: Any
    device: str = "cpu"

    @property
    def name(self) -> str:
        return self.spec.name

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> Tensor:
        """A CPU tensor over a numpy array (made contiguous by the caller)."""
        return cls(TensorSpec(name, _dtype_name(array.dtype), tuple(array.shape)), array)

    @classmethod
    def of_torch(cls, name: str, tensor: TorchTensor) -> Tensor:
        """A tensor over the memory of a torch tensor, on its device; copied if it is not contiguous."""
        import torch

        spec = TensorSpec(name, _dtype_name(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if tensor.device.type == "cpu":
            return cls(spec, data.numpy())
        return cls(spec, data, str(tensor.device))

    def torch(self) -> TorchTensor:
        """A torch tensor over the same memory: on its GPU, or in host memory, which must not be written to.

        Valid as long as the chunk is not released. Work on a GPU tensor must be queued on the stream that torch calls
        current in the thread that releases the chunk.
        """
        import torch

        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        if not self.spec.nbytes:
            return torch.empty(self.spec.shape, dtype=dtype, device=self.device)
        if self.device == "cpu":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # received memory is read-only, of which torch warns
                flat = torch.frombuffer(self.data, dtype=dtype)
        else:
            flat = torch.as_tensor(self.data, device=self.device).view(dtype)
        return flat.reshape(self.spec.shape)

    def on_host(self) -> Tensor:
        """This tensor, or a copy in host memory of one on a GPU, complete on return."""
        return self if self.device == "cpu" else Tensor.of_torch(self.name, self.torch().cpu())


@dataclass(eq=False, slots=True)
class Chunk:
    """The unit that crosses an edge or goes out to the client.

    `run` and `index` are set by the worker, `slot` by the connector that delivered the chunk (None: nothing to
    release). `index` counts from 0 per run and edge. `last` ends the edge; a chunk may be last and carry data.
    `piece` says what an output's tensors are; on an edge between stages it may bring text or tokens.
    `sent_s` is the monotonic time at which the producer's worker put it; 0 for what a stub hands to its worker.
    """

    run: bytes
    edge: str
    index: int = 0
    last: bool = False
    tensors: tuple[Tensor, ...] = ()
    piece: OutputPiece | None = None
    slot: int | None = None
    sent_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        """True for a chunk that carries nothing; such a last chunk only ends the edge."""
        return not self.tensors and self.piece is None

    def tensor(self, name: str) -> Tensor | None:
        """The tensor called `name`, or None."""
        for tensor in self.tensors:
            if tensor.spec.name == name:
                return tensor
        return None

    def piece_of(self, kind: type[AnyPiece]) -> AnyPiece | None:
        """The piece; None in an empty chunk. Raises TypeError if it is of another kind, KeyError if it is missing."""
        if self.piece is None and not self.is_empty:
            raise KeyError(kind.__name__)
        if self.piece is not None and not isinstance(self.piece, kind):
            raise TypeError(f"{self.edge} sent a {type(self.piece).__name__} instead of a {kind.__name__}")
        return self.piece

    @property
    def nbytes(self) -> int:
        return sum(t.spec.nbytes for t in self.tensors)
