# SPDX-License-Identifier: Apache-2.0
"""A device store in shared host memory: drives the device path of the shm carrier where there is no GPU."""

from __future__ import annotations

import mmap
import os

from triton_omni.backends.connectors.slab import Extents
from triton_omni.backends.core.chunk import Tensor, TensorSpec


class FakeDevice:
    """One end's slab and its view of the peer's, found by the file's path in /proc."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.extents = Extents(nbytes)
        self.fd = os.memfd_create("fake-device")
        os.ftruncate(self.fd, nbytes)
        self.map = mmap.mmap(self.fd, nbytes)
        self.peer: mmap.mmap | None = None
        self.published = self.closed = False
        self.settled = 0

    def alloc(self, nbytes: int) -> int | None:
        return self.extents.alloc(nbytes)

    def free(self, offset: int) -> None:
        self.extents.free(offset)

    def write(self, offset: int, tensor: Tensor) -> None:
        self.map[offset : offset + tensor.spec.nbytes] = bytes(memoryview(tensor.data))

    def publish(self) -> bytes | None:
        if self.published:
            return None
        self.published = True
        return f"/proc/{os.getpid()}/fd/{self.fd}".encode()

    def attach(self, announcement: bytes) -> None:
        with open(announcement, "rb") as file:
            self.peer = mmap.mmap(file.fileno(), self.nbytes, prot=mmap.PROT_READ)

    def read(self, offset: int, spec: TensorSpec) -> Tensor:
        assert self.peer is not None
        return Tensor(spec, self.peer[offset : offset + spec.nbytes], "cuda:0")

    def settle(self) -> None:
        self.settled += 1

    def to_host(self, tensor: Tensor) -> Tensor:
        return Tensor(tensor.spec, tensor.data)

    def close(self) -> None:
        self.closed = True
        os.close(self.fd)
        self.map.close()
        if self.peer is not None:
            self.peer.close()
