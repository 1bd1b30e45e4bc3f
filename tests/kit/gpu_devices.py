# SPDX-License-Identifier: Apache-2.0
"""What tests on a GPU share: which device a test can have here, and a device slab whose peer is in the same process."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.kit.connector_contract import take_chunk
from triton_omni.backends.connectors.cuda_ipc import DeviceSlab, Mapping
from triton_omni.backends.connectors.shm import ShmConnector
from triton_omni.backends.core.chunk import Chunk, Tensor

HAS_GPU = Path("/dev/nvidiactl").exists()
BUILD = "cuda" if any(distributions(name="vllm")) else "cpu"
"""Which vLLM this environment has: it runs on that device and no other."""
NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA device"))
VLLM_DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(BUILD == "cuda", reason="this vLLM is the build for GPUs")),
    pytest.param(
        "cuda",
        marks=(*NEEDS_GPU, pytest.mark.skipif(BUILD == "cpu", reason="this vLLM is the build for CPUs")),
    ),
)


class CountingSlab(DeviceSlab):
    """A device slab that counts what was allocated in it."""

    allocs = 0

    def alloc(self, nbytes: int) -> int | None:
        self.allocs += 1
        return super().alloc(nbytes)


class SameProcessMapping(Mapping):
    """Memory of this process, which CUDA maps nowhere else."""

    def __del__(self) -> None:
        pass  # nothing was opened


class SameProcessSlab(CountingSlab):
    """For both ends in one process, where CUDA opens no handle: the pointer itself is handed over."""

    announced: dict[bytes, int] = {}

    def announce(self) -> bytes:
        announcement = super().announce()
        self.announced[announcement] = self._pointer
        return announcement

    def attach(self, announcement: bytes) -> None:
        self._peer = SameProcessMapping(self._runtime, self.announced[announcement], self._extents.size)


def share_slabs(a: ShmConnector, b: ShmConnector, tensor: Tensor) -> None:
    """Do what two workers on one GPU do with their first GPU tensors: after it both directions use the slabs."""
    for end in (a, b):
        assert end.device is not None
        end.device.meet("the other end", "gpu", "gpu")
    for sender, receiver in ((a, b), (b, a)):
        assert sender.put(Chunk(b"w" * 16, "warm-up", tensors=(tensor,)))
        receiver.release(take_chunk(receiver))
        assert sender.get() is None, "the answer and the acknowledgement are not the caller's"
        assert sender.device is not None
        assert sender.device.state == "shared", sender.device.reason


def on_gpu(name: str, array) -> Tensor:
    """The array's bytes in device memory; the spec says what they are."""
    import numpy as np
    import torch

    return Tensor(Tensor.of(name, array).spec, torch.from_numpy(array.reshape(-1).view(np.uint8)).cuda(), "cuda:0")


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor wherever it is."""
    return bytes((tensor if tensor.device == "cpu" else DeviceSlab().to_host([tensor])[0]).data)
