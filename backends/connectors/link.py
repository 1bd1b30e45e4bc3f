# SPDX-License-Identifier: Apache-2.0
"""A SOCK_SEQPACKET unix socket that never blocks: ordered packets, file descriptors, and EOF when the peer dies.

Used by one thread. Packets that the kernel cannot take now wait in a backlog, which `put` of the connectors bounds.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Sequence

from backends.connectors.base import PACKET_BYTES, PeerLost

SEND_BUFFER_BYTES = 4 << 20  # the default 208 KiB makes bursts of small chunks wait for the reader
PACKETS_PER_TURN = 256  # how much one busy peer may be read before others get their turn

Buffer = bytes | bytearray | memoryview


class Link:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.socket = sock
        self.lost = False
        self._broken = False  # sending failed; what the peer sent before it died may still be read
        self._backlog: deque[tuple[bytes, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def backlog_packets(self) -> int:
        """Packets the kernel has not taken yet; the caller watches for writability while there are any."""
        return 0 if self._broken else len(self._backlog)

    def send(self, parts: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        """Send one packet made of `parts`. Descriptors are duplicated here; the caller keeps its own."""
        if self.lost or self._broken:
            raise PeerLost("the peer is gone")
        if sum(len(part) for part in parts) > PACKET_BYTES:
            raise ValueError(f"a packet may have {PACKET_BYTES} bytes")
        if self._backlog or not self._try_send(parts, fds):
            self._backlog.append((b"".join(parts), tuple(os.dup(fd) for fd in fds)))

    def flush(self) -> None:
        """Hand waiting packets to the kernel, as far as it takes them."""
        while self._backlog and not self._broken:
            packet, fds = self._backlog[0]
            if not self._try_send((packet,), fds):
                return
            self._backlog.popleft()
            close_all(fds)

    def receive(self) -> list[tuple[bytes, list[int]]]:
        """Packets that have arrived, each with its descriptors. At EOF marks the link lost and returns the rest."""
        packets: list[tuple[bytes, list[int]]] = []
        while not self.lost and len(packets) < PACKETS_PER_TURN:
            try:
                packet, fds, flags, _ = socket.recv_fds(self.socket, PACKET_BYTES, 2)
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # the peer left packets of ours unread; the kernel says so once, before what it had sent
            except OSError:
                packet, fds, flags = b"", [], 0
            if not packet or flags & socket.MSG_TRUNC:
                close_all(fds)
                self.abandon()
                break
            packets.append((packet, fds))
        return packets

    def abandon(self) -> None:
        """Stop talking to a peer that is gone or cannot be understood; both ends see EOF."""
        self.lost = True
        self._shut_down()

    def close(self) -> None:
        """Close the socket; the peer sees EOF."""
        self.lost = True
        self.socket.close()
        while self._backlog:
            close_all(self._backlog.popleft()[1])

    def _try_send(self, parts: Sequence[Buffer], fds: Sequence[int]) -> bool:
        try:
            if fds:
                socket.send_fds(self.socket, parts, list(fds))
            else:
                self.socket.sendmsg(parts)
        except BlockingIOError:
            return False
        except OSError as error:
            self._broken = True
            self._shut_down()  # whatever the reason was, EOF follows and is reported like any other loss
            raise PeerLost(f"the peer is gone ({error.strerror})") from None
        return True

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def close_all(fds: Sequence[int]) -> None:
    """Close received or duplicated descriptors."""
    for fd in fds:
        os.close(fd)
