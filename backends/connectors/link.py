# SPDX-License-Identifier: Apache-2.0
"""A SOCK_SEQPACKET unix socket that never blocks: ordered packets, file descriptors, and EOF when the peer dies.

Used by one thread. Packets that the kernel cannot take now wait in a backlog, which `put` of the connectors bounds.
While `joining`, small packets are held and sent as one: two system calls for many chunks and acknowledgements
instead of two for each.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence

from triton_omni.backends.connectors.base import PACKET_BYTES, PeerLost
from triton_omni.backends.connectors.carrier import Buffer

SEND_BUFFER_BYTES = 4 << 20  # the default 208 KiB makes bursts of small chunks wait for the reader
JOINED = b"J"  # first byte of a joined packet: frames follow, each behind its length; no single packet starts so
JOINED_FRAMES = 1000  # the kernel takes 1024 parts per packet
JOINED_BYTES = 48 << 10  # held packets above this are sent, so that the reader can begin
PACKETS_PER_TURN = 256  # packets read of one busy peer before others are served

_U32 = struct.Struct("<I")
_RECEIVE_BYTES = PACKET_BYTES + len(JOINED) + _U32.size  # one frame of full size that travels as a joined packet
_FDS_SPACE = socket.CMSG_LEN(2 * array("i").itemsize)
_TRUNCATED = int(socket.MSG_TRUNC)  # a plain number: the flag's own `&` is slow


class Link:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.socket = sock
        self.lost = False
        self.peer_closed = False
        """True when EOF was read: the peer's process is gone, or it has closed its end."""
        self.joining = False
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._broken = False  # sending failed; what the peer sent before it died may still be read
        self._backlog: deque[tuple[bytes, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def backlog_packets(self) -> int:
        """Packets not yet accepted by the kernel."""
        return 0 if self._broken else len(self._backlog)

    @property
    def trusted(self) -> bool:
        """A unix socket is in a private folder or was inherited."""
        return True

    @property
    def wants_write(self) -> bool:
        """The caller is to poll for writability."""
        return self.backlog_packets > 0

    def send(self, parts: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        """Send one packet made of `parts`. Descriptors are duplicated here; the caller keeps its own."""
        if self.lost or self._broken:
            raise PeerLost("the peer is gone")
        nbytes = sum(map(len, parts))
        if nbytes > PACKET_BYTES:
            raise ValueError(f"packet must be at most {PACKET_BYTES} bytes (got {nbytes})")
        if fds or not self.joining:
            self.send_held()
            self._send_now(parts, fds)
            return
        if self._held_bytes + nbytes > JOINED_BYTES or len(self._held) >= JOINED_FRAMES:
            self.send_held()
        self._held.append(b"".join((_U32.pack(nbytes), *parts)))
        self._held_bytes += nbytes

    def send_held(self) -> None:
        """Send held packets."""
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            self._send_now((JOINED, *held))

    def flush(self) -> None:
        """Pass packets of the backlog to the kernel, as far as it accepts them."""
        while self._backlog and not self._broken:
            packet, fds = self._backlog[0]
            if not self._try_send((packet,), fds):
                return
            self._backlog.popleft()
            close_all(fds)

    def receive(self) -> list[tuple[Buffer, Sequence[int]]]:
        """Packets that have arrived, each with its descriptors. At EOF marks the link lost and returns the rest."""
        packets: list[tuple[Buffer, Sequence[int]]] = []
        while not self.lost and len(packets) < PACKETS_PER_TURN:
            try:
                packet, ancillary, flags, _ = self.socket.recvmsg(_RECEIVE_BYTES, _FDS_SPACE)
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # the peer left packets of ours unread; the kernel says so once, before what it had sent
            except OSError:
                packet, ancillary, flags = b"", [], 0
            fds = _received(ancillary) if ancillary else []
            if not packet or flags & _TRUNCATED:
                self.peer_closed = not packet
                close_all(fds)
                self.abandon()
                break
            if packet[:1] != JOINED:
                packets.append((packet, fds))
            elif fds or not _split(packet, packets):
                close_all(fds)
                self.abandon()
        return packets

    def abandon(self) -> None:
        """End the link to a peer that is gone or sends malformed packets; both ends see EOF."""
        self.lost = True
        self._shut_down()

    def close(self) -> None:
        """Close the socket; the peer sees EOF."""
        self.lost = True
        self.socket.close()
        while self._backlog:
            close_all(self._backlog.popleft()[1])

    def _send_now(self, parts: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        if self._backlog or not self._try_send(parts, fds):
            self._backlog.append((b"".join(parts), tuple(os.dup(fd) for fd in fds)))

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
            self._shut_down()  # EOF follows and is reported like any other loss
            raise PeerLost(f"the peer is gone ({error.strerror})") from None
        return True

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def _received(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Descriptors that came with a packet."""
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _split(packet: bytes, packets: list[tuple[Buffer, Sequence[int]]]) -> bool:
    """Append the frames of a joined packet to `packets`; False if it is malformed."""
    view, at, end = memoryview(packet), len(JOINED), len(packet)
    while at + 4 <= end:
        start = at + 4
        at = start + _U32.unpack_from(packet, at)[0]
        if at > end:
            return False
        packets.append((view[start:at], ()))
    return at == end


def close_all(fds: Sequence[int]) -> None:
    """Close received or duplicated descriptors."""
    for fd in fds:
        os.close(fd)
