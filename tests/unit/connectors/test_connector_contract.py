# SPDX-License-Identifier: Apache-2.0
"""Every carrier passes the one contract; a carrier that cannot run here is skipped in sight."""

from __future__ import annotations

import socket

import pytest

from tests.kit.connector_contract import CHECKS, Carrier, check_name, closing, larger_than_the_slab_takes_another_way
from tests.kit.fake_device_store import FakeDevice
from tests.kit.gpu_devices import NEEDS_GPU, OwnSlab, bytes_of, on_gpu
from triton_omni.backends.connectors import shm
from triton_omni.backends.connectors.base import Credits
from triton_omni.backends.connectors.link import Link
from triton_omni.backends.connectors.shm import ShmConnector
from triton_omni.backends.core.chunk import Tensor


def _shm(window, limit):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = (ShmConnector(Link(s), credits=Credits(window, limit)) for s in (ours, theirs))
    return closing(*ends)


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_shm(check, monkeypatch):
    monkeypatch.setattr(shm, "SLAB_BYTES", 4 << 20)  # the checks fill it; 64 MiB would only cost time
    check(Carrier("shm", _shm, slab_bytes=4 << 20))


def _device_pair(window, limit):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = (ShmConnector(Link(s), FakeDevice(8 << 20), Credits(window, limit)) for s in (ours, theirs))
    return closing(*ends)


def _on_device(name, array):
    return Tensor(Tensor.of(name, array).spec, array, "cuda:0")


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_shm_with_a_device_store(check):
    """The path of GPU tensors, over a store in host memory."""
    check(Carrier("device", _device_pair, _on_device, outlives=False))


def _gpu_pair(window, limit):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = (ShmConnector(Link(s), OwnSlab(nbytes=8 << 20), Credits(window, limit)) for s in (ours, theirs))
    return closing(*ends)


@pytest.mark.parametrize("check", [pytest.param(check, id=check_name(check), marks=NEEDS_GPU) for check in CHECKS])
def test_cuda_ipc(check):
    """The same path over a GPU's memory; that it can be opened by another process is test_shm_processes'."""
    check(Carrier("cuda_ipc", _gpu_pair, on_gpu, outlives=False, read=bytes_of))


def test_shm_with_its_real_slab():
    """Sizes around the real slab's half, once."""
    larger_than_the_slab_takes_another_way(Carrier("shm", _shm, slab_bytes=shm.SLAB_BYTES))
