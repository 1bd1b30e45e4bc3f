# SPDX-License-Identifier: Apache-2.0
"""GPU tensors between two processes over a fake CUDA runtime: late streams, refusals, and the death of either side."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import select
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.kit.connector_contract import PATIENCE_S, open_fds, take, take_chunk
from tests.kit.fake_cuda import CudaError, FakeCuda
from triton_omni.backends.connectors.base import Credits, PeerLost
from triton_omni.backends.connectors.cuda_ipc import DeviceSlab
from triton_omni.backends.connectors.link import Link
from triton_omni.backends.connectors.shm import ShmConnector
from triton_omni.backends.core.chunk import Chunk

ROOT = Path(__file__).resolve().parents[3]
RUN = b"r" * 16
STREAM = 7


@pytest.fixture
def cuda(monkeypatch):
    """This process's runtime; torch's current stream is not the default one."""
    runtime = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", runtime.torch_module(STREAM))
    yield runtime
    gc.collect()  # views of received chunks unmap the peer's slab
    assert (runtime.mapped, runtime.violations) == (0, [])
    runtime.end_process()


@contextlib.contextmanager
def peer(mode, cuda, window=1):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.cuda_peer", str(theirs.fileno()), mode],
            pass_fds=(theirs.fileno(),),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    end = ShmConnector(Link(ours), DeviceSlab(nbytes=8 << 20, runtime=cuda), Credits(window))
    end.device.meet("the peer", "gpu", "gpu")
    try:
        yield end, process
    finally:
        end.close()
        process.kill()
        process.wait(PATIENCE_S)
        process.stdin.close()
        process.stdout.close()


def put(end, chunk):
    """Offer a chunk until there is a credit for it, as a worker's loop does."""
    while not end.put(chunk):
        assert select.select([end], [], [], PATIENCE_S)[0], "no credit came back"
        assert end.get() is None


def wait_for_answer(end):
    while end.device.state == "announced":
        assert select.select([end], [], [], PATIENCE_S)[0], "the announcement was not answered"
        assert end.get() is None


def late_tensor(cuda, value, nbytes=5000):
    """A GPU tensor that a queued kernel of the engine will fill."""
    tensor = cuda.tensor("x", np.zeros(nbytes, np.uint8))
    pointer = tensor.data.pointer
    cuda.launch(STREAM, lambda: ctypes.memset(pointer, value, nbytes) and None)
    return tensor


def send_and_read_back(end, cuda, count):
    """Bytes and devices of `count` late tensors, as the peer's late kernels saw them."""
    for i in range(count):
        put(end, Chunk(RUN, "e", i, tensors=(late_tensor(cuda, i + 1),)))
        wait_for_answer(end)
    end.send(b"all sent")
    back = [take_chunk(end) for _ in range(count)]
    values = [set(bytes(chunk.tensors[0].data)) for chunk in back]
    devices = [chunk.piece.text for chunk in back]
    for chunk in back:
        end.release(chunk)
    return values, devices


def test_kernels_that_run_late_on_either_side_neither_send_nor_read_stale_bytes(cuda):
    """With one credit every chunk gets the same place in the slab, so an early acknowledgement overwrites it."""
    with peer("late", cuda) as (end, _):
        values, devices = send_and_read_back(end, cuda, 6)
        assert values == [{i + 1} for i in range(6)]
        assert devices == ["cpu", *["cuda:0"] * 5], "only the first chunk goes before the peer has answered"
        assert end.in_flight == 0


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("refuse", "cudaErrorMapBufferObjectFailed"), ("other", "another GPU")],
    ids=["refuse", "other"],
)
def test_a_peer_that_cannot_open_the_slab_says_why_and_tensors_go_through_the_host(cuda, mode, reason):
    with peer(mode, cuda) as (end, _):
        values, devices = send_and_read_back(end, cuda, 3)
        assert values == [{1}, {2}, {3}]
        assert devices == ["cpu"] * 3
        assert end.device.state == "host"
        assert reason in end.device.reason


def test_without_memory_for_a_slab_tensors_go_through_the_host(cuda):
    cuda.fail["cudaMalloc"] = CudaError.cudaErrorMemoryAllocation
    with peer("late", cuda) as (end, _):
        values, devices = send_and_read_back(end, cuda, 2)
        assert (values, devices) == ([{1}, {2}], ["cpu"] * 2)
        assert "cudaErrorMemoryAllocation" in end.device.reason


def test_a_tensor_larger_than_the_slab_goes_through_the_host(cuda):
    with peer("late", cuda) as (end, _):
        send_nbytes = (5000, 9 << 20, 5000)
        for i, nbytes in enumerate(send_nbytes):
            put(end, Chunk(RUN, "e", i, tensors=(late_tensor(cuda, i + 1, nbytes),)))
            wait_for_answer(end)
        end.send(b"all sent")
        for i, nbytes in enumerate(send_nbytes):
            chunk = take_chunk(end)
            assert bytes(chunk.tensors[0].data) == bytes([i + 1]) * nbytes
            assert chunk.piece.text == ("cuda:0" if i == 2 else "cpu")
            end.release(chunk)


def hand_over_two(end, cuda):
    for i in range(2):
        put(end, Chunk(RUN, "e", i, tensors=(late_tensor(cuda, i + 1),)))
        wait_for_answer(end)


def wait_until_lost(end):
    with pytest.raises(PeerLost):
        take(end)


def test_a_slab_is_freed_when_its_killed_reader_is_gone(cuda):
    fds = open_fds()
    with peer("hold", cuda) as (end, process):
        hand_over_two(end, cuda)
        assert process.stdout.readline() == b"held\n"
        assert cuda.allocated == 1
        process.kill()
        process.wait(PATIENCE_S)
        wait_until_lost(end)
        end.close()
        assert cuda.allocated == 0
    assert open_fds() == fds


def test_a_slab_is_freed_after_its_living_reader_has_unmapped_it(cuda):
    with peer("close", cuda) as (end, process):
        hand_over_two(end, cuda)
        assert process.stdout.readline() == b"closed, 0 mapped, []\n"
        wait_until_lost(end)
        end.close()
        assert process.poll() is None, "the peer is alive"
        assert cuda.allocated == 0
        assert cuda.violations == []


def test_a_slab_that_a_living_peer_may_have_mapped_is_not_freed(cuda):
    with peer("hold", cuda) as (end, process):
        hand_over_two(end, cuda)
        assert process.stdout.readline() == b"held\n"
        end.close()
        assert cuda.allocated == 1


def test_tensors_of_a_killed_producer_can_be_read_until_they_are_dropped(cuda):
    with peer("produce", cuda) as (end, process):
        first, second = take_chunk(end), take_chunk(end)
        assert process.stdout.readline() == b"sent\n"
        assert [chunk.tensors[0].device for chunk in (first, second)] == ["cpu", "cuda:0"]
        process.kill()
        process.wait(PATIENCE_S)
        wait_until_lost(end)
        end.close()
        assert cuda.mapped == 1
        data = cuda.read(second.tensors[0])
        assert data == bytes([2]) * 5000
        second.tensors = ()
        gc.collect()
        assert cuda.mapped == 0
