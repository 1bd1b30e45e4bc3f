# SPDX-License-Identifier: Apache-2.0
"""The other end of a link with a device slab over a fake CUDA runtime: `python -m tests.kit.cuda_peer FD MODE`.

late      copies every GPU tensor by queued kernels, releases its chunk at once, and only when a message comes waits
          for its stream and sends the copies back
refuse    cannot open the other side's memory
other     has another GPU than its Hello said
hold      takes one chunk, keeps it, prints "held" and waits to be killed
close     takes one chunk, closes the link and stays alive until its input ends
produce   sends a GPU tensor, prints "sent" and waits to be killed
"""

from __future__ import annotations

import ctypes
import select
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import cast

import numpy as np

from tests.kit.fake_cuda import CudaError, DeviceArray, FakeCuda
from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.connectors.cuda_ipc import DeviceSlab
from triton_omni.backends.connectors.link import Link
from triton_omni.backends.connectors.shm import ShmConnector
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.outputs import TextPiece

STREAM = 9


class Peer:
    def __init__(self, fd: int, mode: str) -> None:
        self.cuda = FakeCuda(gpu=b"GPU-1" if mode == "other" else b"GPU-0")
        if mode == "refuse":
            self.cuda.fail["cudaIpcOpenMemHandle"] = CudaError.cudaErrorMapBufferObjectFailed
        sys.modules["torch"] = self.cuda.torch_module(STREAM)
        self.end = ShmConnector(
            Link(socket.socket(fileno=fd)), DeviceSlab(nbytes=8 << 20, runtime=cast(ModuleType, self.cuda))
        )
        assert self.end.device is not None
        self.end.device.meet("the test", "gpu", "gpu")

    def take(self) -> Chunk | bytes:
        while (item := self.end.get()) is None:
            select.select([self.end], [], [])
        return item

    def take_chunk(self) -> Chunk:
        item = self.take()
        assert isinstance(item, Chunk)
        return item

    def copy_late(self) -> None:
        """Modes late, refuse and other: the chunks' bytes, as an engine's kernels see them when they run."""
        copies: list[DeviceArray] = []
        devices: list[str] = []
        while isinstance(item := self.take(), Chunk):
            tensor = item.tensors[0]
            copy = DeviceArray(self.cuda, bytes(tensor.spec.nbytes))
            if tensor.device == "cpu":
                ctypes.memmove(copy.pointer, bytes(tensor.data), tensor.spec.nbytes)
            else:
                pointer = tensor.data.__cuda_array_interface__["data"][0]
                self.cuda.launch(STREAM, self._kernel(copy, pointer, tensor.spec.nbytes))
            copies.append(copy)
            devices.append(tensor.device)
            self.end.release(item)
        self.cuda.cudaStreamSynchronize(STREAM)
        for i, (copy, device) in enumerate(zip(copies, devices, strict=True)):
            data = Tensor.of("x", np.frombuffer(copy.tobytes(), np.uint8))
            assert self.end.put(Chunk(b"p" * 16, "back", i, tensors=(data,), piece=TextPiece(device)))
        self.take()  # until the other side closes

    @staticmethod
    def _kernel(copy: DeviceArray, pointer: int, nbytes: int) -> Callable[[], None]:
        def run() -> None:
            ctypes.memmove(copy.pointer, pointer, nbytes)

        return run

    def hold(self) -> None:
        held = self.take_first_on_gpu()
        print("held", flush=True)
        sys.stdin.read()
        self.end.release(held)

    def close(self) -> None:
        self.take_first_on_gpu()
        self.end.close()
        print(f"closed, {self.cuda.mapped} mapped, {self.cuda.violations}", flush=True)
        sys.stdin.read()

    def take_first_on_gpu(self) -> Chunk:
        while (chunk := self.take_chunk()).tensors[0].device == "cpu":
            self.end.release(chunk)
        return chunk

    def produce(self) -> None:
        assert self.end.device is not None
        for index in range(2):  # the first goes through the host: its slab is not attached yet
            data = self.cuda.tensor("x", np.full(5000, index + 1, np.uint8))
            assert self.end.put(Chunk(b"p" * 16, "e", index, tensors=(data,)))
            while self.end.device.state == "announced":
                select.select([self.end], [], [])
                assert self.end.get() is None
        print("sent", flush=True)
        sys.stdin.read()


def main(fd: int, mode: str) -> None:
    peer = Peer(fd, mode)
    actions = {"hold": peer.hold, "close": peer.close, "produce": peer.produce}
    try:
        actions.get(mode, peer.copy_late)()
    except PeerLost:
        peer.end.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
