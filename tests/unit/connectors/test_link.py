# SPDX-License-Identifier: Apache-2.0
"""The packet socket: order under a full kernel buffer, descriptors, and every way a peer goes away."""

from __future__ import annotations

import os
import socket

import pytest

from tests.kit.connector_contract import open_fds
from triton_omni.backends.connectors.base import PACKET_BYTES, PeerLost
from triton_omni.backends.connectors.link import PACKETS_PER_TURN


def packets(link):
    return [packet for packet, _ in link.receive()]


def test_a_backlog_keeps_order_and_descriptors(links):
    a, b = links
    fds = open_fds()
    with open("/dev/null", "rb") as null:
        for i in range(600):
            a.send((b"%03d" % i, bytes(9_000)), (null.fileno(),) if i % 100 == 99 else ())
    assert a.backlog_packets > 50
    seen = 0
    while seen < 600:
        for packet, received in b.receive():
            assert packet[:3] == b"%03d" % seen
            assert len(received) == (seen % 100 == 99)
            for fd in received:
                assert os.fstat(fd).st_rdev == os.stat("/dev/null").st_rdev
                os.close(fd)
            seen += 1
        a.flush()
    assert a.backlog_packets == 0
    assert open_fds() == fds


def test_one_turn_reads_a_bounded_number(links):
    a, b = links
    for _ in range(PACKETS_PER_TURN + 5):
        a.send((b"x",))
        a.flush()
    first = packets(b)
    a.flush()
    assert len(first) == PACKETS_PER_TURN
    assert len(packets(b)) >= 1


def test_an_oversized_packet_is_our_own_mistake(links):
    a, b = links
    with pytest.raises(ValueError, match="packet must be at most"):
        a.send((bytes(PACKET_BYTES), b"x"))
    a.send((bytes(PACKET_BYTES),))
    assert packets(b) == [bytes(PACKET_BYTES)]


def test_unread_packets_do_not_hide_what_the_peer_had_sent(links):
    """The kernel reports a reset before the data if the peer dies with packets of ours unread."""
    a, b = links
    b.send((b"one",))
    a.send((b"unread",))
    b.send((b"two",))
    b.close()
    assert packets(a) == [b"one", b"two"]
    assert a.lost


def test_closing_drops_the_backlog_and_its_descriptors(links):
    a, b = links
    before = open_fds()
    with open("/dev/null", "rb") as null:
        while a.backlog_packets < 10:
            a.send((bytes(50_000),), (null.fileno(),))
    a.close()
    assert a.backlog_packets == 0
    assert open_fds() <= before, "duplicates of descriptors are closed, and the socket"
    for _, received in b.receive():
        for fd in received:
            os.close(fd)


def test_after_a_failed_send_nothing_is_sent_and_everything_is_read(links):
    a, b = links
    b.send((b"last words",))
    b.close()
    with pytest.raises(PeerLost):
        a.send((b"x",))
    with pytest.raises(PeerLost, match="gone"):
        a.send((b"x",))
    assert a.backlog_packets == 0
    a.flush()
    assert packets(a) == [b"last words"]
    assert a.lost
    assert packets(a) == []


def test_whatever_makes_a_send_fail_both_ends_see_an_end(links, monkeypatch):
    """A send may fail while the peer lives (too many descriptors in flight): neither end may wait forever then."""
    a, b = links
    b.send((b"kept",))

    def too_many(*_):
        raise OSError(109, "Too many references: cannot splice")

    monkeypatch.setattr(socket, "send_fds", too_many)
    with open("/dev/null", "rb") as null, pytest.raises(PeerLost, match="Too many references"):
        a.send((b"x",), (null.fileno(),))
    assert packets(a) == [b"kept"]
    assert a.lost
    assert packets(b) == []
    assert b.lost


def test_a_backlog_of_a_dead_peer_is_dropped_by_flush(links):
    a, b = links
    while a.backlog_packets < 5:
        a.send((bytes(50_000),))
    b.close()
    with pytest.raises(PeerLost):
        a.flush()
    assert a.backlog_packets == 0
