# SPDX-License-Identifier: Apache-2.0
"""A receiver survives whatever a peer sends: everything ends in PeerLost, nothing crashes, hangs or leaks."""

from __future__ import annotations

import os
import random
import socket
import struct

import msgspec
import numpy as np
import pytest

from tests.kit.connector_contract import open_fds, take_chunk
from triton_omni.backends.connectors import shm
from triton_omni.backends.connectors.base import PACKET_BYTES, PeerLost
from triton_omni.backends.connectors.link import Link
from triton_omni.backends.connectors.shm import ShmConnector
from triton_omni.backends.core.chunk import ITEM_BYTES, Chunk, Tensor, TensorSpec

U32 = struct.Struct("<I")
RUN = b"r" * 16


@pytest.fixture
def wire():
    """A raw socket and the connector that reads from it."""
    raw, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.settimeout(5.0)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    end = ShmConnector(Link(ours))
    yield raw, end
    raw.close()
    end.close()


def chunk_packet(**change):
    fields = {
        "slot": 0, "run": RUN, "edge": "e", "index": 0, "last": False, "piece": None,
        "tensors": [(("x", "uint8", (4,)), "cpu", 0)], "location": shm.INLINE, "offset": 0, "nbytes": 4,
        "device_offset": -1,
    } | change  # fmt: skip
    header = msgspec.msgpack.encode(list(fields.values()))
    return shm.CHUNK + U32.pack(len(header)) + header + b"abcd"


BAD_PACKETS = {
    "unknown kind": b"Z",
    "a frame longer than its joined packet": b"J" + U32.pack(100) + shm.MESSAGE + b"cut off",
    "a joined packet with a rest": b"J" + U32.pack(1) + b"ZZ",
    "an empty frame": b"J" + U32.pack(0),
    "no header": shm.CHUNK,
    "short length": shm.CHUNK + b"\x01",
    "header longer than packet": shm.CHUNK + U32.pack(10_000) + b"\x90",
    "header is not a header": shm.CHUNK + U32.pack(1) + b"\x90",
    "header is deeply nested": shm.CHUNK + U32.pack(100_000) + b"\x9b" + b"\x91" * 100_000,
    "huge array": shm.CHUNK + U32.pack(5) + b"\xdd\xff\xff\xff\xff",
    "short acknowledgement": shm.ACK + b"\x01",
    "long acknowledgement": shm.ACK + bytes(7),
    "slab without descriptor": shm.SLAB,
    "long message without descriptor": shm.LONG_MESSAGE + U32.pack(9),
    "long message of no length": shm.LONG_MESSAGE,
    "device slab for a host": shm.DEVICE + b"x",
    "slab payload before the slab": chunk_packet(location=shm.IN_SLAB),
    "one-shot without descriptor": chunk_packet(location=shm.ONE_SHOT),
    "tensor beyond the payload": chunk_packet(tensors=[(("x", "uint8", (5,)), "cpu", 0)]),
    "tensor before the payload": chunk_packet(tensors=[(("x", "uint8", (1,)), "cpu", -2)]),
    "tensor of negative size": chunk_packet(tensors=[(("x", "uint8", (-3,)), "cpu", 3)]),
    "tensor of huge size": chunk_packet(tensors=[(("x", "float64", (2**60, 2**60)), "cpu", 0)]),
    "unknown dtype": chunk_packet(tensors=[(("x", "object", (1,)), "cpu", 0)]),
    "GPU tensor for a host": chunk_packet(tensors=[(("x", "uint8", (1,)), "cuda:0", 0)], device_offset=0),
    "a piece of no kind": chunk_packet(piece={"type": "smell"}),
    "a piece with a field of another type": chunk_packet(piece={"type": "text", "text": 5}),
    "too long": shm.MESSAGE + bytes(PACKET_BYTES + 8),
    "empty": b"",
}


def lost(end):
    """Everything the end delivers until it says PeerLost."""
    got = []
    for _ in range(10_000):
        try:
            item = end.get()
        except PeerLost:
            return got
        if item is None:
            raise AssertionError("a malformed packet was swallowed")
        got.append(item)
    raise AssertionError("the end never gave up")


@pytest.mark.parametrize("packet", BAD_PACKETS.values(), ids=list(BAD_PACKETS))
@pytest.mark.parametrize("descriptors", [0, 2])
def test_a_malformed_packet_ends_the_link_and_keeps_what_came_before(wire, packet, descriptors):
    raw, end = wire
    fds = open_fds()
    raw.send(shm.MESSAGE + b"before")
    with open("/dev/null", "rb") as null:
        if descriptors:
            socket.send_fds(raw, (packet,), [null.fileno()] * descriptors)
        else:
            raw.send(packet)
    raw.send(shm.MESSAGE + b"after")
    assert lost(end) == [b"before"]
    with pytest.raises(PeerLost):
        end.send(b"x")
    assert open_fds() == fds
    assert raw.recv(1 << 20) == b"", "the peer sees that its link has ended"


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        (shm.SLAB, 100),
        (shm.LONG_MESSAGE + U32.pack(5_000), 100),
        (chunk_packet(location=shm.ONE_SHOT, nbytes=9_000), 100),
    ],
    ids=["slab", "long message", "one-shot"],
)
def test_a_memory_smaller_than_announced_is_refused(wire, kind, nbytes):
    raw, end = wire
    fd = os.memfd_create("small")
    os.ftruncate(fd, nbytes)
    socket.send_fds(raw, (kind,), [fd])
    os.close(fd)
    assert lost(end) == []


def test_a_slab_payload_outside_the_slab_is_refused(wire, monkeypatch):
    monkeypatch.setattr(shm, "SLAB_BYTES", 8192)
    raw, end = wire
    fd = os.memfd_create("slab")
    os.ftruncate(fd, 8192)
    socket.send_fds(raw, (shm.SLAB,), [fd])
    os.close(fd)
    raw.send(chunk_packet(location=shm.IN_SLAB, offset=8190, nbytes=4))
    assert lost(end) == []


def test_an_unknown_acknowledgement_is_ignored(wire):
    raw, end = wire
    raw.send(shm.ACK + U32.pack(77))
    assert end.get() is None
    raw.send(shm.MESSAGE + b"x")
    assert end.get() == b"x"


def test_descriptors_beside_packets_that_need_none_are_closed(wire):
    raw, end = wire
    fds = open_fds()
    with open("/dev/null", "rb") as null:
        for _ in range(50):
            socket.send_fds(raw, (shm.MESSAGE + b"x",), [null.fileno()])
            assert end.get() == b"x"
    assert open_fds() == fds


def test_random_garbage_never_crashes_or_hangs():
    """Random bytes, and good packets with random changes: whatever comes out, the end is PeerLost or silence."""
    rng = random.Random(7)
    good = [
        chunk_packet(),
        chunk_packet(tensors=[], location=shm.NO_PAYLOAD),
        shm.ACK + U32.pack(0),
        shm.MESSAGE + b"m",
    ]
    fds = open_fds()
    for _ in range(3_000):
        raw, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end = ShmConnector(Link(ours))
        packet = bytearray(rng.choice(good)) if rng.random() < 0.7 else bytearray(rng.randbytes(rng.randint(1, 200)))
        for _ in range(rng.randint(1, 4)):
            packet[rng.randrange(len(packet))] = rng.randrange(256)
        raw.send(packet)
        try:
            while (item := end.get()) is not None:
                if isinstance(item, Chunk):
                    end.release(item)
        except PeerLost:
            pass
        raw.close()
        end.close()
    assert open_fds() == fds


def test_a_gpu_tensor_without_a_device_store_arrives_in_host_memory(wire):
    """cuda-bindings may be missing where an engine runs on a GPU; torch copies then. "cpu:0" stands for the GPU."""
    torch = pytest.importorskip("torch")
    raw, end = wire
    other = ShmConnector(Link(raw))
    for dtype, nbytes in (("bfloat16", 12), ("float32", 40_000), ("float32", 0)):
        spec = TensorSpec("y", dtype, (nbytes // ITEM_BYTES[dtype],))
        data = torch.arange(nbytes).to(torch.uint8)
        assert end.put(Chunk(RUN, "e", tensors=(Tensor.of("x", np.ones(3)), Tensor(spec, data, "cpu:0"))))
        got = take_chunk(other)
        assert [(tensor.name, tensor.device) for tensor in got.tensors] == [("x", "cpu"), ("y", "cpu")]
        assert (got.tensors[1].spec, bytes(got.tensors[1].data)) == (spec, data.numpy().tobytes())
        other.release(got)
    other.close()
