# SPDX-License-Identifier: Apache-2.0
"""What tests on a GPU share: which device a test can have here, and a device slab whose peer is in the same process."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest

from triton_omni.backends.connectors.cuda_ipc import DeviceSlab
from triton_omni.backends.core.chunk import Tensor

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


class OwnSlab(DeviceSlab):
    """A device slab for both ends in one process, where CUDA opens no handle: the pointer itself is handed over."""

    announced: dict[bytes, int] = {}

    def publish(self) -> bytes | None:
        announcement = super().publish()
        if announcement is not None:
            self.announced[announcement] = self._pointer
        return announcement

    def attach(self, announcement: bytes) -> None:
        self._peer_pointer = self.announced[announcement]

    def close(self) -> None:
        self._peer_pointer = 0
        super().close()


def on_gpu(name: str, array) -> Tensor:
    """The array's bytes in device memory; the spec says what they are."""
    import numpy as np
    import torch

    return Tensor(Tensor.of(name, array).spec, torch.from_numpy(array.reshape(-1).view(np.uint8)).cuda(), "cuda:0")


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor wherever it is."""
    return bytes(tensor.data if tensor.device == "cpu" else DeviceSlab().to_host(tensor).data)
