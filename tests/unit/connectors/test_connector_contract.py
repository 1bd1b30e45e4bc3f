# SPDX-License-Identifier: Apache-2.0
"""Every carrier passes the one contract; a carrier that cannot run here is skipped in sight."""

from __future__ import annotations

import contextlib
import socket

import numpy as np
import pytest

from tests.kit import tcp_ends
from tests.kit.connector_contract import CHECKS, Carrier, check_name, closing, larger_than_the_slab_takes_another_way
from tests.kit.fake_cuda import FakeCuda
from tests.kit.gpu_devices import NEEDS_GPU, CountingSlab, SameProcessSlab, bytes_of, on_gpu, share_slabs
from triton_omni.backends.connectors import shm, tcp
from triton_omni.backends.connectors.base import Credits
from triton_omni.backends.connectors.link import Link
from triton_omni.backends.connectors.shm import ShmConnector
from triton_omni.backends.connectors.tcp import tls_contexts


def _shm(window, limit):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = (ShmConnector(Link(s), credits=Credits(window, limit)) for s in (ours, theirs))
    return closing(*ends)


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_shm(check, monkeypatch):
    monkeypatch.setattr(shm, "SLAB_BYTES", 4 << 20)  # the checks fill it; 64 MiB would only cost time
    check(Carrier("shm", _shm, slab_bytes=4 << 20))


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_tcp(check, secured, monkeypatch):
    monkeypatch.setattr(tcp, "WINDOW_BYTES", 4 << 20)
    contexts = tls_contexts(*tcp_ends.certificates()) if secured else (None, None)
    check(Carrier("tcp", lambda window, limit: tcp_ends.pair(window, limit, contexts), slab_bytes=4 << 20))


class DeviceEnds:
    """A carrier of GPU tensors: two ends whose slabs are shared, and what was made and allocated."""

    def __init__(self, make_slab, make_tensor):
        self._make_slab, self._make_tensor = make_slab, make_tensor
        self.tensors = self.allocs = 0

    def tensor(self, name, array):
        self.tensors += 1
        return self._make_tensor(name, array)

    @contextlib.contextmanager
    def pair(self, window, limit):
        slabs = [self._make_slab(), self._make_slab()]
        sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        a, b = (ShmConnector(Link(s), slab, Credits()) for s, slab in zip(sockets, slabs, strict=True))
        with closing(a, b):
            share_slabs(a, b, self._make_tensor("x", np.zeros(1, np.uint8)))
            for end, slab in ((a, slabs[0]), (b, slabs[1])):
                end.credits.window, end.credits.limit, slab.allocs = window, limit, 0
            yield a, b
            self.allocs += sum(slab.allocs for slab in slabs)

    def check_slabs_were_used(self):
        assert self.allocs or not self.tensors, "GPU tensors went through host memory"


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_cuda_ipc_over_a_fake_runtime(check):
    cuda = FakeCuda(same_process=True)
    ends = DeviceEnds(lambda: CountingSlab(nbytes=8 << 20, runtime=cuda), cuda.tensor)

    @contextlib.contextmanager
    def pair(window, limit):
        with ends.pair(window, limit) as both:
            yield both
        cuda.end_process()

    check(Carrier("cuda_ipc", pair, ends.tensor, outlives=False, read=cuda.read))
    ends.check_slabs_were_used()


@pytest.mark.parametrize("check", [pytest.param(check, id=check_name(check), marks=NEEDS_GPU) for check in CHECKS])
def test_cuda_ipc_on_a_gpu(check):
    """That another process can open the memory is tested by test_cuda_ipc_processes."""
    ends = DeviceEnds(lambda: SameProcessSlab(nbytes=8 << 20), on_gpu)
    check(Carrier("cuda_ipc", ends.pair, ends.tensor, outlives=False, read=bytes_of))
    ends.check_slabs_were_used()


def test_shm_with_its_real_slab():
    """Sizes around the real slab's half, once."""
    larger_than_the_slab_takes_another_way(Carrier("shm", _shm, slab_bytes=shm.SLAB_BYTES))
