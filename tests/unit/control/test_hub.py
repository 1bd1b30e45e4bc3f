# SPDX-License-Identifier: Apache-2.0
"""Hubs over real sockets: connect, reuse, order, losses, posts from other threads, probe."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time

import msgspec
import numpy as np
import pytest

from tests.kit.connector_contract import open_fds
from triton_omni.backends.connectors import shm
from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.control import hub as hub_module
from triton_omni.backends.control.hub import Hub, Lost, listen, probe
from triton_omni.backends.control.messages import (
    HelloMessage,
    PingMessage,
    ProgressMessage,
    ReleaseMessage,
    StopMessage,
    encode,
)
from triton_omni.backends.core.chunk import Chunk, Tensor

RUN = b"r" * 16
HANGS_S = 60.0


@pytest.fixture
def make(tmp_path):
    """Hubs that are closed at the end; a name makes them listen."""
    made = []

    def hub(name, listening=True):
        made.append(Hub(name, tmp_path / f"{name}.sock" if listening else None))
        return made[-1]

    yield hub
    for one in made:
        if one._selector.get_map() is not None:
            one.close()


def gather(hub, count, *others, timeout_s=5.0):
    """The next `count` items of a hub, while others run too."""
    got, deadline = [], time.monotonic() + timeout_s
    while len(got) < count:
        assert time.monotonic() < deadline, f"only {got}"
        for other in others:
            other.poll(0)
        got += hub.poll(0.01)
    return got


def test_the_first_use_connects_and_the_next_reuse_the_link(make):
    a, b = make("a"), make("b")
    peer = a.connect(b.address)
    assert a.connect(b.address) is peer
    peer.send(StopMessage(RUN))
    [(at_b, item)] = gather(b, 1)
    assert item == StopMessage(RUN)
    assert at_b.name == "a"
    at_b.send(ReleaseMessage(RUN))
    [(source, item)] = gather(a, 1)
    assert source is peer
    assert item == ReleaseMessage(RUN)
    assert peer.name == "b"


def test_an_address_without_a_listener(make, tmp_path):
    a = make("a")
    fds = open_fds()
    for address in (str(tmp_path / "nowhere.sock"), a.address + "x", str(tmp_path)):
        with pytest.raises(PeerLost, match="no process listens"):
            a.connect(address)
    assert open_fds() == fds


def test_a_listener_that_cannot_take_more_blocks_no_other_link(make, tmp_path):
    path = tmp_path / "full.sock"
    with contextlib.ExitStack() as stack:
        stack.enter_context(listen(path))
        with contextlib.suppress(BlockingIOError):
            for _ in range(1_000):
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting.setblocking(False)
                waiting.connect(str(path))
        with pytest.raises(PeerLost, match=os.strerror(errno.EAGAIN)):
            make("a").connect(str(path))


def test_a_post_after_the_close_touches_no_descriptor(make):
    a = make("a")
    number = a._wake_fd
    a.close()
    with open(os.eventfd(0, os.EFD_NONBLOCK), "rb", buffering=0) as other:
        os.dup2(other.fileno(), number)  # somebody got the number that was ours
        try:
            a.post("late")
            with pytest.raises(BlockingIOError):
                os.eventfd_read(other.fileno())
        finally:
            os.close(number)


def test_a_socket_file_of_a_dead_process_is_replaced(make, tmp_path):
    path = tmp_path / "a.sock"
    listen(path).close()
    assert path.exists()
    make("a")
    make("b").connect(str(path))


def test_messages_and_chunks_keep_their_order(make):
    a, b = make("a"), make("b")
    peer = a.connect(b.address)
    sent = []
    for i in range(200):
        if i % 2:
            peer.send(PingMessage(live=i))
            sent.append(i)
        elif peer.put(
            Chunk(i.to_bytes(16, "big"), "e", i, tensors=(Tensor.of("x", np.full(5_000, i % 251, np.uint8)),))
        ):
            sent.append(i)
    got = gather(b, len(sent), a)
    for expected, (source, item) in zip(sent, got, strict=True):
        if isinstance(item, Chunk):
            assert item.index == expected
            source.release(item)
        else:
            assert item.live == expected
    deadline = time.monotonic() + 5
    while peer.connector.in_flight:
        a.poll(0.01)
        b.poll(0)
        assert time.monotonic() < deadline


def test_a_full_socket_is_written_on_when_the_peer_reads(make):
    """Nothing but the hub's own watch for writability moves the backlog."""
    a, b = make("a"), make("b")
    peer = a.connect(b.address)
    for i in range(3_000):
        peer.send(PingMessage(live=i, text="x" * 4_000))
    assert peer.connector.link.backlog_packets > 0
    got = gather(b, 3_000, a, timeout_s=20)
    assert [item.live for _, item in got] == list(range(3_000))
    a.poll(0)
    assert peer.connector.link.backlog_packets == 0
    assert not a._writing, "no more watching for writability, or poll would spin"


def test_what_a_lost_peer_had_sent_comes_before_its_loss(make):
    a, b = make("a"), make("b")
    peer = a.connect(b.address)
    for _ in range(300):  # more than one turn's worth
        peer.send(StopMessage(RUN))
    [(at_b, _), *more] = gather(b, 1, a)
    a.close()
    got = more + gather(b, 300 - len(more))
    assert all(source is at_b for source, _ in got)
    assert [type(item).__name__ for _, item in got] == ["StopMessage"] * 299 + ["Lost"]
    assert at_b.lost
    assert not at_b.send(StopMessage(RUN))
    assert not at_b.put(Chunk(RUN, "e"))
    at_b.release(Chunk(RUN, "e"))
    assert b.poll(0) == [], "a loss is reported once"


def test_a_send_to_a_dead_peer_is_reported_by_poll(make):
    a, b = make("a"), make("b")
    peer = a.connect(b.address)
    b.close()
    assert not peer.send(StopMessage(RUN))
    [(source, item)] = gather(a, 1)
    assert source is peer
    assert isinstance(item, Lost)


def test_a_lost_address_can_be_connected_again(make):
    a, b = make("a"), make("b")
    first = a.connect(b.address)
    b.close()
    gather(a, 1)
    again = make("b")
    second = a.connect(again.address)
    assert second is not first
    second.send(StopMessage(RUN))
    assert gather(again, 1)[0][1] == StopMessage(RUN)


def test_adopted_sockets_speak_the_same(make):
    a, b = make("a", listening=False), make("b", listening=False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    at_a, at_b = a.adopt(ours), b.adopt(theirs)
    at_a.send(StopMessage(RUN))
    assert gather(b, 1) == [(at_b, StopMessage(RUN))]
    assert at_b.name == "a"
    assert a.address == ""


@pytest.mark.parametrize(
    "packet",
    [b"Mgarbage", b"M", shm.MESSAGE + msgspec.msgpack.encode(["unheard-of", 1]), b"\xff\x00", b"M" + b"\x91" * 50_000,
     shm.MESSAGE + encode(ProgressMessage(RUN, {"a": 7}))[:-1] + b"\x91" * 20_000 + b"\x07",
     shm.MESSAGE + encode(HelloMessage(999, "from the future"))],
    ids=["text", "nothing", "unknown tag", "unknown kind", "nested", "nested value", "other version"],
)  # fmt: skip
def test_a_peer_that_speaks_nonsense_is_dropped(make, packet):
    a, b = make("a"), make("b")
    good = a.connect(b.address)
    bad = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bad.settimeout(5)
    bad.connect(b.address)
    bad.send(packet)
    good.send(StopMessage(RUN))
    got = [item for _, item in gather(b, 2)]
    assert sorted(type(item).__name__ for item in got) == ["Lost", "StopMessage"]
    while bad.recv(100_000):  # the hello, then EOF
        pass
    bad.close()


def test_a_malformed_packet_after_a_full_turn_is_not_overlooked(make):
    """Exactly a turn's worth of items, then garbage: no further event of the kernel announces it."""
    b = make("b")
    bad = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bad.connect(b.address)
    for _ in range(hub_module.ITEMS_PER_TURN - 1):
        bad.send(shm.MESSAGE + encode(StopMessage(RUN)))
    bad.send(b"Zgarbage")
    got = gather(b, hub_module.ITEMS_PER_TURN)
    assert isinstance(got[-1][1], Lost)
    bad.close()


def test_want_of_descriptors_delays_new_links_and_leaves_the_old_ones_alone(make, monkeypatch):
    monkeypatch.setattr(hub_module, "ACCEPT_PAUSE_S", 0.02)
    a, b = make("a"), make("b")
    old = b.connect(a.address)
    old.send(StopMessage(RUN))
    gather(a, 1, b)
    old.send(StopMessage(RUN))
    new = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    new.connect(a.address)
    new.send(shm.MESSAGE + encode(ReleaseMessage(RUN)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        got = [item for _, item in gather(a, 1)]
        for _ in range(5):
            got += [item for _, item in a.poll(0.03)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert got == [StopMessage(RUN)]
    assert gather(a, 1)[0][1] == ReleaseMessage(RUN)
    new.close()


# --- other threads -----------------------------------------------------------------------------------------------
def test_a_post_wakes_a_sleeping_poll(make):
    hub = make("a")
    thread = threading.Thread(target=hub.post, args=("item",))
    thread.start()
    assert gather(hub, 1, timeout_s=5) == [(None, "item")]
    thread.join()


def test_posts_of_many_threads_all_come_in_order(make):
    hub = make("a")
    threads = [threading.Thread(target=lambda t=t: [hub.post((t, i)) for i in range(2_000)]) for t in range(4)]
    for thread in threads:
        thread.start()
    got = [item for _, item in gather(hub, 8_000)]
    for thread in threads:
        thread.join()
    for t in range(4):
        assert [i for owner, i in got if owner == t] == list(range(2_000))


def test_a_wake_during_a_wake_up_is_not_lost(make, monkeypatch):
    """Another thread posts just while poll takes note of an earlier post: later posts must still wake it."""
    hub = make("a")
    real = hub_module.os.eventfd_read

    def read_and_be_raced(fd):
        hub.post("raced")
        value = real(fd)
        hub.post("raced again")
        return value

    monkeypatch.setattr(hub_module.os, "eventfd_read", read_and_be_raced)
    hub.post("first")
    got = [item for _, item in gather(hub, 3)]
    assert got == ["first", "raced", "raced again"]
    monkeypatch.setattr(hub_module.os, "eventfd_read", real)
    hub.poll(0)
    timer = threading.Timer(0.05, hub.post, ("later",))
    timer.start()
    started = time.monotonic()
    got = hub.poll(HANGS_S)
    timer.join()
    assert got == [(None, "later")]
    assert time.monotonic() - started < HANGS_S, "poll slept through the post"


def test_wake_alone_makes_poll_return(make):
    hub = make("a")
    hub.wake()
    hub.wake()
    started = time.monotonic()
    assert hub.poll(HANGS_S) == []
    assert time.monotonic() - started < HANGS_S
    assert hub.poll(0.0) == []


# --- ends ----------------------------------------------------------------------------------------------------------
def test_a_closed_hub_leaves_nothing_behind(tmp_path):
    fds = open_fds()
    a, b = Hub("a", tmp_path / "a.sock"), Hub("b", tmp_path / "b.sock")
    peer = a.connect(b.address)
    peer.put(Chunk(RUN, "e", tensors=(Tensor.of("x", np.zeros(100_000, np.uint8)),)))
    b.poll(0.1)
    a.close()
    b.close()
    assert peer.lost
    assert not (tmp_path / "a.sock").exists()
    assert open_fds() == fds


def _answer(hub, stop, answer):
    while not stop.is_set():
        for peer, item in hub.poll(0.05):
            if isinstance(item, PingMessage):
                answer(peer)


def test_probe_asks_for_a_sign_of_life(make):
    hub, stop = make("alive"), threading.Event()
    thread = threading.Thread(target=_answer, args=(hub, stop, lambda peer: peer.send(PingMessage("me", "ready", 3))))
    thread.start()
    fds = open_fds()
    try:
        assert probe(hub.address, 5.0) == PingMessage("me", "ready", 3)
    finally:
        stop.set()
        thread.join()
    hub.poll(0)
    assert open_fds() == fds


def test_probe_tells_dead_from_silent(make, tmp_path):
    with pytest.raises(PeerLost):
        probe(str(tmp_path / "unused.sock"), 1.0)
    silent = make("silent")
    with pytest.raises(TimeoutError, match="no answer"):
        probe(silent.address, 0.05)
    path = tmp_path / "rude.sock"
    rude = listen(path)
    rude.settimeout(5)
    thread = threading.Thread(target=lambda: rude.accept()[0].close())
    thread.start()
    with pytest.raises(PeerLost):
        probe(str(path), 5.0)
    thread.join()
    rude.close()
