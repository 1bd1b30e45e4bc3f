# SPDX-License-Identifier: Apache-2.0
"""The shm carrier between two real processes: echo, and a peer that is killed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.connector_contract import named_shm, open_fds, pattern, take, take_chunk
from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.connectors.link import Link
from triton_omni.backends.connectors.shm import ShmConnector
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.outputs import TextPiece

ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def peer(mode, store=None):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.shm_peer", str(theirs.fileno()), mode],
            pass_fds=(theirs.fileno(),),
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
    end = ShmConnector(Link(ours), store)
    try:
        yield end, process
    finally:
        end.close()
        process.kill()
        process.wait(10)
        process.stdout.close()


def test_another_process_sends_everything_back():
    fds, names = open_fds(), named_shm()
    with peer("echo") as (end, process):
        for index, nbytes in enumerate((0, 10, 8_193, 1 << 20, 40 << 20)):
            data = pattern(nbytes)
            assert end.put(
                Chunk(b"r" * 16, "e", index, nbytes > 1 << 20, (Tensor.of("x", data),), TextPiece(str(index)))
            )
            back = take_chunk(end)
            assert (back.index, back.piece) == (index, TextPiece(str(index)))
            assert bytes(back.tensors[0].data) == data.tobytes()
            end.release(back)
        end.send(bytes(1 << 20))
        assert take(end) == bytes(1 << 20)
        assert end.in_flight == 0
        assert named_shm() == names
        assert named_shm(process.pid) == []
        end.close()
        assert process.wait(10) == 0, "the peer ends at EOF"
    assert open_fds() == fds


def test_what_a_killed_process_had_sent_is_delivered():
    fds = open_fds()
    with peer("flood") as (end, process):
        assert process.stdout.readline() == b"sent\n"
        got = [take_chunk(end) for _ in range(2)]
        end.send(b"never read" * 100)  # an unread packet makes the kernel report a reset before the data
        process.kill()
        process.wait(10)
        got += [take_chunk(end) for _ in range(6)]
        assert take(end) == b"ready"
        for i, chunk in enumerate(got):
            assert chunk.index == i
            data = memoryview(chunk.tensors[0].data)
            assert len(data) == (10, 50_000, 40 << 20)[i % 3 if i < 3 else i % 2]
            assert data[0] == data[-1] == i
        with pytest.raises(PeerLost):
            take(end)
        for chunk in got:
            end.release(chunk)  # a dead sender needs no acknowledgement
        del data
    assert open_fds() == fds


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no CUDA device")
def test_gpu_tensors_cross_both_ways_in_the_slabs():
    """A slab cannot be opened in the process that made it, so the other end of this carrier is a process."""
    import torch

    from triton_omni.backends.connectors.cuda_ipc import DeviceSlab

    with peer("cuda", DeviceSlab(nbytes=8 << 20)) as (end, _):
        end.device.meet("the peer", "gpu", "gpu")
        for index, nbytes in enumerate((10, 0, 1, 8_192, 8_193, 1 << 20, 3 << 20, 20 << 20)):
            data = pattern(nbytes)
            there = Tensor.of_torch("x", torch.from_numpy(data).cuda())
            assert end.put(Chunk(b"r" * 16, "e", index, tensors=(there, Tensor.of("host", data))))
            back = take_chunk(end)
            tensors = {tensor.name: tensor for tensor in back.tensors}
            in_slab = index > 0 and nbytes <= 8 << 20
            assert tensors["x"].device == ("cuda:0" if in_slab else "cpu"), "through the host: the first, the too large"
            assert tensors["x"].torch().cpu().numpy().tobytes() == data.tobytes()
            assert bytes(tensors["host"].data) == data.tobytes()
            end.release(back)
        assert end.in_flight == 0
