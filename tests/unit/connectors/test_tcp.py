# SPDX-License-Identifier: Apache-2.0
"""The TCP carrier: greeting, what a peer without the key can do, malformed frames, windows, GPU tensors."""

from __future__ import annotations

import random
import select
import socket
import struct
import time

import msgspec
import pytest

from tests.kit.connector_contract import Carrier, chunk_of, open_fds, pattern, settle, take, take_chunk
from tests.kit.fake_cuda import FakeCuda
from tests.kit.tcp_ends import KEY, end_of, greet, pair, sockets
from triton_omni.backends.connectors import tcp
from triton_omni.backends.connectors.base import MESSAGE_BYTES, PACKET_BYTES, PeerLost
from triton_omni.backends.connectors.carrier import ACK, CHUNK, MESSAGE
from triton_omni.backends.connectors.cuda_ipc import DeviceSlab
from triton_omni.backends.connectors.greeting import FIRST_BYTES, MAGIC, NONCE_BYTES, PROOF_BYTES, Greeting
from triton_omni.backends.core.chunk import Chunk, Tensor

PREFIX = struct.Struct("<cIQ")
RUN = b"r" * 16
CARRIER = Carrier("tcp", pair)


def frame(kind, header=b"", payload=b"", header_bytes=None, nbytes=None):
    sizes = len(header) if header_bytes is None else header_bytes, len(payload) if nbytes is None else nbytes
    return PREFIX.pack(kind, *sizes) + header + payload


def chunk_frame(payload=b"abcd", **change):
    fields = {
        "slot": 0, "run": RUN, "edge": "e", "index": 0, "last": False, "piece": None,
        "tensors": [(("x", "uint8", (4,)), "cpu", 0)], "location": 0, "offset": 0, "nbytes": len(payload),
        "device_offset": -1,
    } | change  # fmt: skip
    return frame(CHUNK, msgspec.msgpack.encode(list(fields.values())), payload)


@pytest.fixture
def wire():
    """A raw socket that has been greeted, and the connector that reads from it."""
    raw, accepted = sockets()
    raw.settimeout(5.0)
    end, dialer = end_of(accepted, dials=False), Greeting(KEY, dials=True)
    while not (end.link.trusted and dialer.trusted):
        raw.sendall(dialer.outgoing)
        dialer.outgoing = b""
        end.link.greet()
        if dialer.missing:
            dialer.receive(raw.recv(dialer.missing, socket.MSG_WAITALL))
    yield raw, end
    raw.close()
    end.close()


def delivered(end):
    """Everything the end delivers until it says PeerLost."""
    got = []
    while True:
        try:
            got.append(take(end))
        except PeerLost:
            return got


# --- greeting ----------------------------------------------------------------------------------------------------
def read_all(raw):
    """What the other end has sent, until it closes."""
    raw.settimeout(5.0)
    data = b""
    try:
        while part := raw.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def refusal(end):
    """Greet until the end refuses; returns the reason."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            end.link.greet()
        except PeerLost as error:
            return str(error)
        assert not end.link.trusted, "a stranger was trusted"
        select.select([end], [], [], 0.1)
    raise AssertionError("the end never refused")


def test_nothing_of_ours_leaves_to_a_listener_without_the_key():
    raw, accepted = sockets()
    dialer, other = end_of(raw, dials=True), Greeting(b"other" * 7, dials=False)
    dialer.send(b"secret")
    dialer.link.greet()
    other.receive(accepted.recv(FIRST_BYTES, socket.MSG_WAITALL))
    accepted.sendall(other.outgoing)
    assert "does not know the key" in refusal(dialer)
    assert read_all(accepted) == b""
    with pytest.raises(PeerLost):
        dialer.get()
    accepted.close(), dialer.close()


def test_a_dialer_without_the_key_gets_a_proof_and_no_more():
    raw, accepted = sockets()
    listener, other = end_of(accepted, dials=False), Greeting(b"other" * 7, dials=True)
    listener.send(b"secret")
    raw.sendall(other.outgoing + bytes(PROOF_BYTES))
    assert "does not know the key" in refusal(listener)
    assert len(read_all(raw)) == FIRST_BYTES + PROOF_BYTES
    raw.close(), listener.close()


def test_a_recorded_greeting_proves_nothing_to_the_next_listener():
    raw, accepted = sockets()
    first, dialer = end_of(accepted, dials=False), Greeting(KEY, dials=True)
    recorded = dialer.outgoing
    raw.sendall(recorded)
    select.select([first], [], [], 5)
    first.link.greet()
    dialer.outgoing = b""
    dialer.receive(raw.recv(dialer.missing, socket.MSG_WAITALL))
    dialer.receive(raw.recv(dialer.missing, socket.MSG_WAITALL))
    recorded += dialer.outgoing
    raw.sendall(dialer.outgoing)
    greet(first)
    again, accepted = sockets()
    second = end_of(accepted, dials=False)
    again.sendall(recorded)
    assert "does not know the key" in refusal(second)
    for one in (raw, again, first, second):
        one.close()


def test_an_echo_of_our_own_greeting_is_refused():
    raw, accepted = sockets()
    dialer = end_of(raw, dials=True)
    dialer.link.greet()
    accepted.sendall(accepted.recv(1000))
    assert "no process of a Triton-Omni server" in refusal(dialer)
    accepted.close(), dialer.close()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 9, bytes(200), b"\xff" * 4096, MAGIC + b"l" + bytes(NONCE_BYTES),
     MAGIC + b"x" + bytes(NONCE_BYTES), b"OMNI-TCP9d" + bytes(NONCE_BYTES)],
    ids=["HTTP", "zeros", "ones", "another listener", "unknown role", "another version"],
)  # fmt: skip
def test_who_speaks_otherwise_hears_nothing(garbage):
    raw, accepted = sockets()
    listener = end_of(accepted, dials=False)
    raw.sendall(garbage)
    assert "no process of a Triton-Omni server" in refusal(listener)
    assert read_all(raw) == b""
    raw.close(), listener.close()


@pytest.mark.parametrize("cut", [0, 1, FIRST_BYTES - 1, FIRST_BYTES, FIRST_BYTES + PROOF_BYTES - 1])
def test_a_greeting_that_ends_early_is_no_peer(cut):
    raw, accepted = sockets()
    listener = end_of(accepted, dials=False)
    raw.sendall((Greeting(KEY, dials=True).outgoing + bytes(PROOF_BYTES))[:cut])
    raw.shutdown(socket.SHUT_WR)
    assert "closed the stream during the greeting" in refusal(listener)
    raw.close(), listener.close()


def test_a_greeting_may_come_a_byte_at_a_time():
    raw, accepted = sockets()
    listener, dialer = end_of(accepted, dials=False), Greeting(KEY, dials=True)
    for _ in range(2):
        for i in range(len(dialer.outgoing)):
            raw.sendall(dialer.outgoing[i : i + 1])
            select.select([listener], [], [], 5)
            listener.link.greet()
        dialer.outgoing = b""
        while dialer.missing and not dialer.trusted:
            dialer.receive(raw.recv(dialer.missing, socket.MSG_WAITALL))
    assert listener.link.trusted
    raw.close(), listener.close()


def test_what_was_sent_before_the_greeting_arrives_after_it():
    with_key = [end_of(s, i == 0) for i, s in enumerate(sockets("::1"))]
    a, b = with_key
    a.send(b"first")
    assert a.put(chunk_of(CARRIER, 100_000))
    greet(a, b)
    assert take(b, a) == b"first"
    got = take_chunk(b, a)
    assert bytes(got.tensors[0].data) == pattern(100_000).tobytes()
    a.close(), b.close()


def test_a_trusted_peer_may_fill_more_than_the_kernels_first_window():
    """64 KiB frames filled it one by one: the sender waited for the reader's process, and sent probes meanwhile."""
    raw, accepted = sockets()
    before = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    a, b = end_of(raw, dials=True), end_of(accepted, dials=False)
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before, "a stranger may not"
    greet(a, b)
    for end in (a, b):
        assert end.link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= tcp.START_WINDOW_BYTES
        assert end.link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1, "a reader is woken by each byte"
    a.close(), b.close()


# --- frames ------------------------------------------------------------------------------------------------------
BAD_FRAMES = {
    "unknown kind": frame(b"Z"),
    "header too long": frame(MESSAGE, header_bytes=PACKET_BYTES + 1),
    "message too long": frame(MESSAGE, nbytes=MESSAGE_BYTES + 1),
    "message with a header": frame(MESSAGE, b"x", b"y"),
    "payload of all memory": frame(CHUNK, nbytes=2**63),
    "payload above the cap": frame(CHUNK, nbytes=tcp.PAYLOAD_BYTES + 1),
    "no header": frame(CHUNK),
    "header is not a header": frame(CHUNK, b"\x90"),
    "header is deeply nested": frame(CHUNK, b"\x9b" + b"\x91" * 100_000),
    "huge array": frame(CHUNK, b"\xdd\xff\xff\xff\xff"),
    "short acknowledgement": frame(ACK, b"\x01"),
    "acknowledgement with a payload": frame(ACK, b"", b"abcd"),
    "payload of another length": chunk_frame(nbytes=5),
    "tensor beyond the payload": chunk_frame(tensors=[(("x", "uint8", (5,)), "cpu", 0)]),
    "tensor before the payload": chunk_frame(tensors=[(("x", "uint8", (1,)), "cpu", -2)]),
    "tensor of negative size": chunk_frame(tensors=[(("x", "uint8", (-3,)), "cpu", 3)]),
    "tensor of huge size": chunk_frame(tensors=[(("x", "float64", (2**60, 2**60)), "cpu", 0)]),
    "unknown dtype": chunk_frame(tensors=[(("x", "object", (1,)), "cpu", 0)]),
    "GPU tensor": chunk_frame(tensors=[(("x", "uint8", (1,)), "cuda:0", 0)]),
    "a piece of no kind": chunk_frame(piece={"type": "smell"}),
    "a slot twice": chunk_frame(index=1) + chunk_frame(index=2),
}


@pytest.mark.parametrize("bad", BAD_FRAMES.values(), ids=list(BAD_FRAMES))
def test_a_malformed_frame_ends_the_link_and_keeps_what_came_before(wire, bad):
    raw, end = wire
    fds = open_fds()
    raw.sendall(frame(MESSAGE, b"", b"before") + bad + frame(MESSAGE, b"", b"after"))
    got = delivered(end)
    assert got[0] == b"before"
    assert b"after" not in got
    with pytest.raises(PeerLost):
        end.send(b"x")
    assert open_fds() == fds
    assert read_all(raw) == b"", "the peer sees that its link has ended"


@pytest.mark.parametrize("rest", [1, PREFIX.size - 1, PREFIX.size + 3, PREFIX.size + 20_000])
def test_a_frame_that_is_cut_off_is_not_delivered(wire, rest):
    raw, end = wire
    whole = frame(MESSAGE, b"", bytes(40_000))
    raw.sendall(frame(MESSAGE, b"", b"before") + whole[:rest])
    raw.shutdown(socket.SHUT_WR)
    assert delivered(end) == [b"before"]


def test_a_half_closed_peer_is_gone(wire):
    raw, end = wire
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLost):
        take(end)
    with pytest.raises(PeerLost):
        end.send(b"x")


def test_a_peer_cannot_send_more_than_the_window(wire, monkeypatch):
    monkeypatch.setattr(tcp, "WINDOW_BYTES", 1 << 20)
    raw, end = wire
    big = [chunk_frame(bytes(600_000), slot=slot, tensors=[]) for slot in range(3)]
    raw.sendall(big[0])
    first = take_chunk(end)
    end.release(first)
    raw.sendall(big[1])
    held = take_chunk(end)
    raw.sendall(big[2][:1000])
    with pytest.raises(PeerLost):
        take(end)
    end.release(held)


def test_an_unknown_acknowledgement_is_ignored(wire):
    raw, end = wire
    raw.sendall(frame(ACK, struct.pack("<I", 77)) + frame(MESSAGE, b"", b"x"))
    assert take(end) == b"x"


def test_the_window_counts_bytes_of_large_chunks(monkeypatch):
    monkeypatch.setattr(tcp, "WINDOW_BYTES", 1 << 20)
    with pair(100, 1000) as (a, b):
        for index in range(2):
            assert a.put(chunk_of(CARRIER, 500_000, index=index))
        assert not a.put(chunk_of(CARRIER, 500_000, index=2))
        assert a.put(chunk_of(CARRIER, 100, index=2)), "a small chunk needs no window"
        for _ in range(3):
            b.release(take_chunk(b, a))
        settle(a, b)
        assert a.put(chunk_of(CARRIER, 3 << 20, index=3)), "one above the window travels alone"
        assert not a.put(chunk_of(CARRIER, 10_000, index=4))
        b.release(take_chunk(b, a))
        settle(a, b)


def test_random_garbage_never_crashes_or_hangs(monkeypatch):
    rng = random.Random(7)
    good = [chunk_frame(), frame(ACK, bytes(4)), frame(MESSAGE, b"", b"m"), chunk_frame(bytes(9000), tensors=[])]
    fds = open_fds()
    for _ in range(500):
        raw, accepted = sockets()
        end = end_of(accepted, dials=False)
        end.link.greeting.trusted = True
        data = bytearray(rng.choice(good)) if rng.random() < 0.7 else bytearray(rng.randbytes(rng.randint(1, 200)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        for item in delivered(end):
            if isinstance(item, Chunk):
                end.release(item)
        raw.close()
        end.close()
    assert open_fds() == fds


def test_gpu_tensors_go_through_pinned_host_memory():
    cuda = FakeCuda(same_process=True)
    ends = []
    for i, sock in enumerate(sockets()):
        ends.append(tcp.TcpConnector(end_of(sock, i == 0).link, DeviceSlab(nbytes=1 << 20, runtime=cuda)))
    a, b = ends
    greet(a, b)
    for end in ends:
        end.device.meet("the peer", "gpu", "gpu")
        assert "host memory (the link is TCP)" in end.device.summary, "never a slab, even on the same GPU"
    for nbytes in (0, 100, 100_000):
        there = cuda.tensor("x", pattern(nbytes))
        assert a.put(Chunk(RUN, "e", tensors=(there, Tensor.of("y", pattern(50)))))
        got = take_chunk(b, a)
        assert [t.device for t in got.tensors] == ["cpu", "cpu"]
        assert bytes(got.tensors[0].data) == pattern(nbytes).tobytes()
        assert bytes(got.tensors[1].data) == pattern(50).tobytes()
        b.release(got)
    a.close(), b.close()
