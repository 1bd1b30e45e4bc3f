# SPDX-License-Identifier: Apache-2.0
"""When a process says that its GPU's memory can be shared; without a GPU, over a runtime that answers as CUDA does."""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace

import pytest

from triton_omni.backends.connectors import cuda_ipc


class Error(IntEnum):
    SUCCESS = 0
    NO_DEVICE = 100


def runtime(count, can_share=1, error=Error.SUCCESS):
    uuid = SimpleNamespace(uuid=SimpleNamespace(bytes=b"\x01\xff"))
    return SimpleNamespace(
        cudaDeviceAttr=SimpleNamespace(cudaDevAttrIpcEventSupport=125),
        cudaGetDeviceCount=lambda: (error, count),
        cudaDeviceGetAttribute=lambda attribute, device: (Error.SUCCESS, can_share if attribute == 125 else 0),
        cudaGetDeviceProperties=lambda device: (Error.SUCCESS, uuid),
    )


@pytest.mark.parametrize(
    ("given", "uuid"),
    [
        (runtime(1), "01ff"),
        (runtime(0), ""),
        (runtime(0, error=Error.NO_DEVICE), ""),
        (runtime(1, can_share=0), ""),
    ],
    ids=["a GPU", "no GPU", "no driver", "memory that cannot be shared"],
)
def test_only_a_gpu_whose_memory_can_be_shared_has_a_uuid(monkeypatch, given, uuid):
    monkeypatch.setattr(cuda_ipc, "_runtime", lambda: given)
    assert cuda_ipc.gpu_uuid() == uuid


def test_without_the_binding_there_is_none(monkeypatch):
    def missing():
        raise ImportError("cuda")

    monkeypatch.setattr(cuda_ipc, "_runtime", missing)
    assert cuda_ipc.gpu_uuid() == ""
    assert cuda_ipc.device_slab() is None
