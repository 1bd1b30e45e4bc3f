# SPDX-License-Identifier: Apache-2.0
"""Hubs over TCP on loopback: peers with the key, strangers of all kinds, pulses. Cut cables: chaos/test_hosts.py."""

from __future__ import annotations

import contextlib
import re
import resource
import select
import socket
import struct
import time

import numpy as np
import pytest

from tests.kit.connector_contract import open_fds
from tests.kit.tcp_ends import KEY, certificates
from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.connectors.greeting import Greeting
from triton_omni.backends.control import tcp_links
from triton_omni.backends.control.address import host_and_port, host_token, parse_address
from triton_omni.backends.control.hub import Hub, Lost
from triton_omni.backends.control.link_settings import LinkSettings
from triton_omni.backends.control.messages import PingMessage, StopMessage
from triton_omni.backends.control.tcp_links import MAX_STRANGERS
from triton_omni.backends.core.chunk import Chunk, Tensor

RUN = b"r" * 16


@pytest.fixture
def make():
    """Hubs on loopback that are closed at the end; nothing may be left open by then."""
    fds, made = open_fds(), []

    def hub(name, host="127.0.0.1", key=KEY, tls=(), address=None):
        made.append(Hub(name, address, links=LinkSettings(host, key, tls=tls), joinable=True))
        return made[-1]

    yield hub
    for one in made:
        if one._selector.get_map() is not None:
            one.close()
    assert open_fds() == fds


def until(true, *hubs, timeout_s=20.0):
    """Poll the hubs until `true(items)`, where items are all they returned; returns the items."""
    items, deadline = [], time.monotonic() + timeout_s
    while not true(items):
        assert time.monotonic() < deadline, f"it never happened; came: {items}"
        for hub in hubs:
            items += [(hub, peer, item) for peer, item in hub.poll(0.005)]
    return items


def of(items, kind):
    return [item for _, _, item in items if isinstance(item, kind)]


def settled(a, peer, *hubs):
    """Wait until the link of `peer` has its pulse; returns the other end's peer and hub."""
    until(lambda _: a.hang_up_fds(peer), a, *hubs)


def dial(hub):
    sock = socket.create_connection(host_and_port(hub.address))
    sock.settimeout(5)
    return sock


def is_closed(sock, *hubs):
    """True when the hub has closed the stream."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for hub in hubs:
            hub.poll(0)
        if select.select([sock], [], [], 0.005)[0]:
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(65536):
                    pass
            return True
    return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_messages_and_chunks_cross_in_order(make, host, secured):
    tls = tuple(map(str, certificates())) if secured else ()
    a, b = make("a", host, tls=tls), make("b", host, tls=tls)
    peer = a.connect(b.address)
    assert a.connect(b.address) is peer
    settled(a, peer, b)
    for i in range(100):
        peer.send(PingMessage(live=i))
        assert peer.put(Chunk(bytes([i]) * 16, "e", 0, tensors=(Tensor.of("x", np.full(20_000, i, np.uint8)),)))
    items = until(lambda items: len(items) == 200, a, b)
    for i in range(100):
        assert items[2 * i][2].live == i
        assert items[2 * i + 1][2].tensors[0].data[0] == i
        items[2 * i + 1][1].release(items[2 * i + 1][2])
    assert items[0][1].name == "a"
    until(lambda _: not peer.connector.in_flight, a, b)
    assert peer.name == "b" and peer.listens_at == b.address


def test_two_processes_of_one_host_use_shared_memory(make, tmp_path):
    a, b = make("a"), make("b", address=tmp_path / "b.sock")
    where = parse_address(b.address)
    assert where.token == host_token() and where.path and where.tcp
    assert type(a.connect(b.address).connector).__name__ == "ShmConnector"
    away = b.address.replace(host_token(), "another-host")
    assert type(a.connect(away).connector).__name__ == "TcpConnector"
    (tmp_path / "b.sock").unlink()  # another mount namespace does not see it
    c = make("c")
    assert type(c.connect(b.address).connector).__name__ == "TcpConnector"


def test_an_address_of_another_host_needs_links():
    hub = Hub("a")
    with pytest.raises(PeerLost, match="`links` are not deployed"):
        hub.connect("tcp://127.0.0.1:1")
    hub.close()


def test_no_process_at_an_address_is_a_loss_with_its_reason(make, caplog):
    a = make("a")
    peer = a.connect("tcp://127.0.0.1:1")
    assert peer.send(StopMessage(RUN)), "it may be used at once"
    assert of(until(lambda items: items, a), Lost)
    assert "link to tcp://127.0.0.1:1 lost: Connection refused" in caplog.text
    with pytest.raises(PeerLost, match="no way to"):
        a.connect("tcp://no-such-host.invalid:1")


@pytest.mark.parametrize("who", ["a", "b"])
def test_another_key_is_a_loss_and_nothing_is_delivered(make, who, caplog):
    a, b = make("a", key=KEY if who == "b" else b"o" * 32), make("b", key=KEY if who == "a" else b"o" * 32)
    peer = a.connect(b.address)
    peer.send(StopMessage(RUN))
    items = until(lambda items: items, a, b)
    assert [(hub, type(item)) for hub, _, item in items] == [(a, Lost)]
    assert "does not know the key" in caplog.text
    assert not b._peers


def test_plain_text_and_tls_do_not_mix(make):
    a, b = make("a"), make("b", tls=tuple(map(str, certificates())))
    a.connect(b.address).send(StopMessage(RUN))
    items = until(lambda items: items, a, b)
    assert [(hub, type(item)) for hub, _, item in items] == [(a, Lost)]


def test_a_flood_of_strangers_keeps_no_peer_out(make):
    a, b = make("a"), make("b")
    flood = []
    for _ in range(3 * MAX_STRANGERS):
        flood.append(dial(b))
        b.poll(0)
        assert len(b._tcp._strangers) <= MAX_STRANGERS
    a.connect(b.address).send(StopMessage(RUN))
    assert of(until(lambda items: items, a, b), StopMessage)
    assert is_closed(flood[0], b), "the oldest stranger gives way"
    for sock in flood:
        sock.close()
    until(lambda _: not b._tcp._strangers, b)


def test_want_of_descriptors_delays_new_links_and_leaves_the_old_ones_alone(make, monkeypatch):
    monkeypatch.setattr(tcp_links, "ACCEPT_PAUSE_S", 0.05)
    a, b = make("a"), make("b")
    old = a.connect(b.address)
    settled(a, old, b)
    new = dial(b)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        old.send(StopMessage(RUN))
        items = until(lambda items: items, a, b)
        started, polls = time.monotonic(), 0
        while time.monotonic() - started < 0.5:
            items += [(b, peer, item) for peer, item in b.poll(0.1)]
            polls += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [type(item) for _, _, item in items] == [StopMessage]
    assert polls < 100, "the loop does not spin meanwhile"
    until(lambda _: b._tcp._strangers, b)
    new.close()


@pytest.mark.parametrize("when", ["at once", "after its hello"])
def test_a_stranger_that_resets_a_tls_listener_hurts_nothing(make, when):
    tls = tuple(map(str, certificates()))
    a, b = make("a", tls=tls), make("b", tls=tls)
    for data in (b"", b"x", b"\x16\x03\x01" + bytes(500)):
        stranger = dial(b)
        stranger.sendall(data)
        if when == "after its hello":
            b.poll(0.01)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
        until(lambda _: not b._tcp._strangers, b)
    a.connect(b.address).send(StopMessage(RUN))
    assert of(until(lambda items: items, a, b), StopMessage)


def test_a_stranger_that_is_slow_is_closed(make, monkeypatch, caplog):
    monkeypatch.setattr(tcp_links, "GREETING_S", 0.2)
    b = make("b")
    silent, slow = dial(b), dial(b)
    slow.sendall(Greeting(KEY, dials=True).outgoing[:20])
    assert is_closed(silent, b) and is_closed(slow, b)
    assert "was refused: it was not greeted within" in caplog.text
    silent.close(), slow.close()


def test_a_listener_that_never_answers_is_lost_in_time(make, monkeypatch):
    monkeypatch.setattr(tcp_links, "GREETING_S", 0.2)
    a = make("a")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        a.connect(f"tcp://127.0.0.1:{mute.getsockname()[1]}").send(StopMessage(RUN))
        assert of(until(lambda items: items, a), Lost)


def next_part(sock, greeting, hub):
    """The next part of a hub's greeting."""
    part = b""
    while len(part) < greeting.missing:
        hub.poll(0.005)
        if select.select([sock], [], [], 0)[0]:
            part += sock.recv(greeting.missing - len(part))
    return part


def greeted(hub):
    """A stream of a process that knows the key, without a pulse; and its greeting."""
    sock, greeting = dial(hub), Greeting(KEY, dials=True)
    while not greeting.trusted:
        sock.sendall(greeting.outgoing)
        greeting.outgoing = b""
        greeting.receive(next_part(sock, greeting, hub))
    sock.sendall(greeting.outgoing)
    until(lambda _: hub._peers, hub)
    return sock, greeting


def test_a_link_without_a_pulse_is_dropped(make, monkeypatch, caplog):
    monkeypatch.setattr(tcp_links, "GREETING_S", 0.2)
    b = make("b")
    sock, _ = greeted(b)
    assert of(until(lambda items: items, b), Lost)
    assert "its pulse did not come" in caplog.text
    sock.close()


def test_a_pulse_must_be_of_its_link_comes_once_and_is_silent(make, caplog):
    b = make("b")
    sock, greeting = greeted(b)
    forged = dial(b)
    forged.sendall(greeting.pulse()[:-1] + b"x")
    pulse = dial(b)
    pulse.sendall(greeting.pulse())
    until(lambda _: b._tcp._pulses, b)
    assert not b._tcp._unsettled
    again = dial(b)
    again.sendall(greeting.pulse())
    until(lambda _: len(b._tcp._strangers) == 2, b)
    for stranger in (forged, again):
        stranger.sendall(b"?")
        assert is_closed(stranger, b)
    assert b._peers, "no stranger hurts the link"
    pulse.sendall(b"x" * 100)
    assert of(until(lambda items: items, b), Lost)
    assert "its pulse carries data" in caplog.text
    for one in (sock, forged, pulse, again):
        one.close()


def test_a_pulse_may_come_before_the_last_part_of_its_greeting(make):
    b = make("b")
    sock, greeting = dial(b), Greeting(KEY, dials=True)
    sock.sendall(greeting.outgoing)
    for _ in range(2):
        greeting.outgoing = b""
        greeting.receive(next_part(sock, greeting, b))
    pulse = dial(b)
    pulse.sendall(greeting.pulse())
    until(lambda _: len(b._tcp._strangers) == 2 and any(s.greeting.pulse_proof for s in b._tcp._strangers), b)
    sock.sendall(greeting.outgoing)
    until(lambda _: b._tcp._pulses and not b._tcp._unsettled, b)
    sock.close(), pulse.close()


def test_the_pulse_of_a_dead_process_hides_nothing_that_it_had_sent(make):
    a, b = make("a"), make("b")
    peer = a.connect(b.address)
    settled(a, peer, b)
    for _ in range(300):
        peer.send(StopMessage(RUN))
    until(lambda _: not peer.connector.link.backlog_packets, a)
    a.close()
    kinds = [type(item).__name__ for _, _, item in until(lambda items: of(items, Lost), b)]
    assert kinds == ["StopMessage"] * 300 + ["Lost"]


def test_a_link_whose_pulse_was_closed_alone_is_dropped(make, monkeypatch, caplog):
    monkeypatch.setattr(tcp_links, "GREETING_S", 0.2)
    a, b = make("a"), make("b")
    peer = a.connect(b.address)
    settled(a, peer, b)
    a._tcp._pulses[peer].socket.shutdown(socket.SHUT_RDWR)
    assert of(until(lambda items: items, b), Lost)
    assert re.search("lost: its pulse stopped", caplog.text)


def test_ports_are_taken_from_the_range(make):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"no port from {port} to {port} of 127.0.0.1 is free"):
            Hub("a", links=LinkSettings("127.0.0.1", KEY, (port, port)), joinable=True)
    hub = Hub("a", links=LinkSettings("127.0.0.1", KEY, (port, port)), joinable=True)
    assert hub.address == f"tcp://127.0.0.1:{port}"
    hub.close()
