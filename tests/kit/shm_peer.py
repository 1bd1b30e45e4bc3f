# SPDX-License-Identifier: Apache-2.0
"""The other end of a shm link in a process of its own: `python -m tests.kit.shm_peer FD MODE`.

echo   sends every message and chunk back, checks nothing, ends at EOF
cuda   the same with a device slab: GPU tensors go back from the view on the other side's slab
flood  puts 8 chunks and "ready", holds what it gets, and waits to be killed
"""

from __future__ import annotations

import select
import socket
import sys

import numpy as np

from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.connectors.link import Link
from triton_omni.backends.connectors.shm import ShmConnector
from triton_omni.backends.core.chunk import Chunk, Tensor


def main(fd: int, mode: str) -> None:
    store = None
    if mode == "cuda":
        from triton_omni.backends.connectors.cuda_ipc import DeviceSlab

        store, mode = DeviceSlab(), "echo"
    end = ShmConnector(Link(socket.socket(fileno=fd)), store)
    if end.device is not None:
        end.device.meet("the test", "gpu", "gpu")
    if mode == "flood":
        for i in range(8):
            big = Tensor.of("x", np.full((10, 50_000, 40 << 20)[i % 3 if i < 3 else i % 2], i, np.uint8))
            assert end.put(Chunk(b"p" * 16, "e", i, tensors=(big,)))
        end.send(b"ready")
        sys.stdout.write("sent\n")
        sys.stdout.flush()
    try:
        while True:
            select.select([end], [], [])
            item = end.get()
            if item is not None and mode == "echo":
                echo(end, item)
    except PeerLost:
        return


def echo(end: ShmConnector, item: Chunk | bytes) -> None:
    if isinstance(item, bytes):
        end.send(item)
        return
    assert end.put(Chunk(item.run, item.edge, item.index, item.last, item.tensors, item.piece))
    end.release(item)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
