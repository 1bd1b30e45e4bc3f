# SPDX-License-Identifier: Apache-2.0
"""Packets that are joined on the way arrive as if each had been sent alone."""

from __future__ import annotations

import contextlib
import os
import struct

import pytest

from triton_omni.backends.connectors.base import PACKET_BYTES
from triton_omni.backends.connectors.link import JOINED, JOINED_BYTES, JOINED_FRAMES
from triton_omni.backends.control.hub import Hub
from triton_omni.backends.control.messages import StopMessage


def received(link):
    return [bytes(packet) for packet, _ in link.receive()]


def test_joined_packets_keep_order_and_borders(links):
    a, b = links
    a.joining = True
    sent = [bytes([i % 7]) * (i % 50) + b"%d" % i for i in range(3 * JOINED_FRAMES // 2)] + [b"x" * JOINED_BYTES, b"y"]
    for packet in sent:
        a.send((packet[:1], packet[1:]))
    a.send_held()
    got = []
    while len(got) < len(sent):
        got += received(b)
    assert got == sent


def test_what_waits_is_not_sent_before_its_time(links):
    a, b = links
    a.joining = True
    a.send((b"one",))
    a.send((b"two",))
    assert received(b) == []
    a.send_held()
    assert received(b) == [b"one", b"two"]


def test_a_descriptor_does_not_overtake(links):
    a, b = links
    a.joining = True
    a.send((b"one",))
    with open("/dev/null", "rb") as null:
        a.send((b"two",), (null.fileno(),))
    a.send((b"three",))
    a.send_held()
    packets = b.receive()
    assert [(bytes(packet), len(fds)) for packet, fds in packets] == [(b"one", 0), (b"two", 1), (b"three", 0)]
    os.close(packets[1][1][0])


def test_an_oversized_packet_is_refused_at_once(links):
    a, _ = links
    a.joining = True
    with pytest.raises(ValueError, match="bytes"):
        a.send((bytes(PACKET_BYTES), b"x"))


@pytest.mark.parametrize(
    "body", [b"\x01", struct.pack("<I", 5) + b"four", struct.pack("<I", 1) + b"ab", struct.pack("<I", 1 << 31)]
)
def test_a_malformed_joined_packet_ends_the_link(links, body):
    a, b = links
    a.socket.send(JOINED + body)
    b.receive()
    assert b.lost


def test_a_hub_joins_what_the_body_sends_and_sends_it_at_the_end(tmp_path):
    a, b = Hub("a"), Hub("b", tmp_path / "b")
    try:
        peer = a.connect(b.address)
        b.poll(1.0)  # accepts
        b.poll(1.0)  # hello
        with a.joined():
            for i in range(5):
                peer.send(StopMessage(bytes([i])))
            assert b.poll(0) == []
        assert [item.run for _, item in b.poll(1.0)] == [bytes([i]) for i in range(5)]
        with contextlib.suppress(RuntimeError), a.joined():
            peer.send(StopMessage(b"kept"))
            raise RuntimeError
        assert [item.run for _, item in b.poll(1.0)] == [b"kept"]
    finally:
        a.close()
        b.close()
