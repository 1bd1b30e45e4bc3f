# SPDX-License-Identifier: Apache-2.0
"""Chunks between two processes of different hosts: one TCP stream of frames between ends that share a key.

A frame is a kind byte, the length of its header (u32), the length of its payload (u64), header and payload. A small
frame is taken out of a read buffer; a larger payload is received where it stays. What a sender has not had
acknowledged is at most WINDOW_BYTES, so that bounds the memory of the receiver. GPU tensors are copied to host memory
first, pinned if there is a device store. Nothing is pickled. A link that has closed is never connected again.

The data stream alone cannot tell a dead host or path: no keep-alive probe is sent while data waits, and
TCP_USER_TIMEOUT kills a healthy peer that does not read during a long step. So each link has a pulse
(control/tcp_links.py): a second stream that carries nothing after its greeting, probed by the kernel.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from triton_omni.backends.connectors.base import INLINE_BYTES, MESSAGE_BYTES, PACKET_BYTES, Credits, PeerLost
from triton_omni.backends.connectors.carrier import (
    ACK,
    CHUNK,
    MALFORMED,
    MESSAGE,
    U32,
    Buffer,
    Header,
    LinkConnector,
    decode_header,
    encode_header,
    in_a_row,
    lay_out,
    part_of,
)
from triton_omni.backends.connectors.device import DevicePath, DeviceStore
from triton_omni.backends.connectors.greeting import Greeting
from triton_omni.backends.core.chunk import Chunk, Tensor

WINDOW_BYTES = 64 << 20  # of payloads above INLINE_BYTES without acknowledgement, as much as a slab of shared memory
PAYLOAD_BYTES = 1 << 30  # cap of one payload; one above WINDOW_BYTES travels alone
BACKLOG_PACKETS = 64  # frames, or groups of them, waiting in user space above which `put` returns False
BUFFER_BYTES = 256 << 10
READ_BYTES = 64 << 10  # asked of the kernel where the next frame's size is not known; more would be copied once more
TURN_BYTES = 4 << 20  # read of one busy peer before others are served
START_WINDOW_BYTES = 512 << 10  # the kernel's 64 KiB are full after one frame of that size: its sender waits and probes
JOINED_BYTES = 48 << 10  # held frames above this are sent, so that the reader can begin
PARTS_PER_CALL = 512  # the kernel takes 1024
_PREFIX = struct.Struct("<cIQ")
_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TcpLink:
    """The stream: its greeting, what waits to be sent, and the socket. Used by one thread."""

    def __init__(self, sock: socket.socket, greeting: Greeting, tls: ssl.SSLContext | None, dials: bool) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.greeting = greeting
        self.lost = False
        self.joining = False
        self.drained = False
        """The last read took all that the kernel had."""
        self._dials = dials
        self._connecting = dials
        self._tls = tls
        self._broken = False  # sending failed; what the peer sent before it died may still be read
        self._held: list[Buffer] = []
        self._held_bytes = 0
        self._backlog: deque[memoryview] = deque()
        self._wants_write = dials
        self._part = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def trusted(self) -> bool:
        """True when the peer has proven that it knows the key; nothing else is sent before."""
        return self.greeting.trusted and not self.greeting.outgoing

    @property
    def backlog_packets(self) -> int:
        """Frames, or groups of them, not yet accepted by the kernel."""
        return 0 if self._broken else len(self._backlog)

    @property
    def wants_write(self) -> bool:
        """The caller is to poll for writability."""
        return self.backlog_packets > 0 if self.trusted else self._wants_write

    @property
    def pending(self) -> bool:
        """True if TLS holds decrypted bytes, which no readiness event will announce."""
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0

    # --- greeting ----------------------------------------------------------------------------------------------------
    def greet(self) -> None:
        """Go on with connecting and greeting as far as the kernel lets it; raises PeerLost with the reason."""
        self._wants_write = False
        try:
            self._secure()
            while not self.lost:
                while self.greeting.outgoing:
                    self._wants_write = True
                    self.greeting.outgoing = self.greeting.outgoing[self.socket.send(self.greeting.outgoing) :]
                self._wants_write = False
                if self.greeting.missing == 0:
                    # a larger first window, for trusted peers alone; unlike SO_RCVBUF it leaves the rest to the kernel
                    for low_water in (START_WINDOW_BYTES, 1):
                        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
                    return
                self._receive_part()
        except ssl.SSLWantWriteError:
            self._wants_write = True
        except _WAIT:
            pass
        except (OSError, ValueError) as error:
            self.abandon()
            raise PeerLost(str(getattr(error, "strerror", None) or error)) from None

    def _secure(self) -> None:
        """Finish connecting and TLS's handshake; raises what asks to wait."""
        if self._connecting:
            if error := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            try:
                self.socket.getpeername()
            except OSError:
                self._wants_write = True
                raise BlockingIOError from None
            self._connecting = False
        if self._tls is not None:
            if not isinstance(self.socket, ssl.SSLSocket):
                self.socket.getpeername()  # of one that was reset, ssl would leave a socket behind that is not closed
                secured = self._tls.wrap_socket(self.socket, server_side=not self._dials, do_handshake_on_connect=False)
                self.socket = secured
            self.socket.do_handshake()
            self._tls = None

    def _receive_part(self) -> None:
        """Receive the peer's next part; raises BlockingIOError while it is not complete."""
        data = self.socket.recv(self.greeting.missing - len(self._part))
        if not data:
            raise ValueError("the peer closed the stream during the greeting")
        self._part += data
        if len(self._part) == self.greeting.missing:
            part, self._part = self._part, b""
            self.greeting.receive(part)

    # --- sending -----------------------------------------------------------------------------------------------------
    def send(self, parts: Sequence[Buffer]) -> None:
        """Send one frame made of `parts`."""
        if self.lost or self._broken:
            raise PeerLost("the peer is gone")
        nbytes = sum(map(len, parts))
        if not self.joining or nbytes > JOINED_BYTES:
            held, self._held, self._held_bytes = self._held, [], 0
            self._send_now((*held, *parts))
            return
        if self._held_bytes + nbytes > JOINED_BYTES:
            self.send_held()
        self._held.append(b"".join(parts))
        self._held_bytes += nbytes

    def send_held(self) -> None:
        """Send held frames."""
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            self._send_now(held)

    def flush(self) -> None:
        """Pass the backlog to the kernel, as far as it accepts it."""
        while self._backlog and self.trusted and not self._broken:
            part = self._backlog[0]
            sent = self._write((part,))
            if sent < len(part):
                self._backlog[0] = part[sent:]
                return
            self._backlog.popleft()

    def _send_now(self, parts: Sequence[Buffer]) -> None:
        if self.trusted and not self._backlog:
            parts = self._try_send(parts)
        if parts:  # copied, because the caller may use its buffers again
            self._backlog.append(memoryview(b"".join(parts)))

    def _try_send(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """What the kernel did not take."""
        for at in range(0, len(parts), PARTS_PER_CALL):
            group = parts[at : at + PARTS_PER_CALL]
            left = _after(group, self._write(group))
            if left:
                return [*left, *parts[at + PARTS_PER_CALL :]]
        return ()

    def _write(self, parts: Sequence[Buffer]) -> int:
        """Bytes that the kernel took; PeerLost if the stream is closed."""
        sent = 0
        try:
            if not isinstance(self.socket, ssl.SSLSocket):
                return self.socket.sendmsg(parts)
            data = memoryview(b"".join(parts))
            while sent < len(data):  # a record at a time
                sent += self.socket.send(data[sent:])
        except _WAIT:
            pass
        except OSError as error:
            self._broken = True
            raise PeerLost(f"the peer is gone ({error.strerror})") from None
        return sent

    # --- receiving ---------------------------------------------------------------------------------------------------
    def read(self, targets: Sequence[memoryview]) -> int:
        """Receive into `targets`, in order; returns the bytes. Marks the link lost at the stream's end."""
        self.drained = False
        try:
            if isinstance(self.socket, ssl.SSLSocket):
                count = self.socket.recv_into(targets[0])
            else:
                count = self.socket.recvmsg_into(targets)[0]
                self.drained = count < sum(map(len, targets))
        except _WAIT:
            self.drained = True
            return 0
        except OSError:
            count = 0
        if count == 0:
            self.abandon()
        return count

    def abandon(self) -> None:
        """End the link to a peer that is gone or sends malformed frames; both ends see the end of the stream."""
        self.lost = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.lost = True
        self.socket.close()
        self._backlog.clear()


def tls_contexts(cert: str | Path, key: str | Path, authority: str | Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(dialer's, listener's) context of mutual TLS; raises OSError (ssl.SSLError) for files that cannot be used.

    Both ends show `cert`, signed by `authority`. Host names are not compared: the greeting says who may connect.
    """
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in contexts:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(cert, key)
        context.load_verify_locations(authority)
    contexts[1].num_tickets = 0  # a pulse is silent after its greeting
    return contexts


def _after(parts: Sequence[Buffer], nbytes: int) -> list[Buffer]:
    """What of `parts` comes after `nbytes`."""
    left: list[Buffer] = []
    for part in parts:
        if nbytes >= len(part):
            nbytes -= len(part)
        else:
            left.append(memoryview(part)[nbytes:])
            nbytes = 0
    return left


class TcpConnector(LinkConnector[TcpLink]):
    """One end of a link between two hosts."""

    def __init__(self, link: TcpLink, device_store: DeviceStore | None = None, credits: Credits | None = None) -> None:
        super().__init__(link, None if device_store is None else DevicePath(device_store, shares=False), credits)
        self._sent: dict[int, tuple[tuple[bytes, str], int]] = {}
        """Slot → what its acknowledgement gives back: a credit and bytes of the window."""
        self._bytes_out = 0
        self._received: dict[int, int] = {}
        """Slot of a chunk that is not released → bytes of the window."""
        self._bytes_in = 0
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        """The part of the buffer that is not parsed yet."""
        self._partial: tuple[bytes, bytes, memoryview] | None = None
        """A frame whose payload is being received: kind, header, payload."""
        self._filled = 0

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    # --- sending -----------------------------------------------------------------------------------------------------
    def send(self, message: bytes) -> None:
        if len(message) > MESSAGE_BYTES:
            raise ValueError(f"message must be at most {MESSAGE_BYTES} bytes (got {len(message)})")
        self.link.send((_PREFIX.pack(MESSAGE, 0, len(message)), message))

    def put(self, chunk: Chunk) -> bool:
        if self.link.lost:
            raise PeerLost("the peer is gone")
        key = (chunk.run, chunk.edge)
        if self.link.backlog_packets >= BACKLOG_PACKETS or not self.credits.free(key):
            return False
        layout, nbytes = lay_out(chunk.tensors)
        if nbytes > PAYLOAD_BYTES:
            raise ValueError(f"a chunk's tensors must be at most {PAYLOAD_BYTES} bytes (got {nbytes})")
        counted = nbytes if nbytes > INLINE_BYTES else 0
        if counted and self._bytes_out and self._bytes_out + counted > WINDOW_BYTES:
            return False
        header = encode_header(self._header(chunk, [(t.spec, "cpu", at) for t, at, _ in layout], nbytes))
        if len(header) > PACKET_BYTES:
            raise ValueError(f"a chunk's header must be at most {PACKET_BYTES} bytes (got {len(header)})")
        self.link.send((_PREFIX.pack(CHUNK, len(header), nbytes), header, *in_a_row(self._in_host_memory(layout))))
        self._sent[self._next_slot] = key, counted
        self._next_slot = (self._next_slot + 1) & 0xFFFFFFFF
        self._bytes_out += counted
        self.credits.take(key)
        return True

    def _send_acknowledgement(self, slots: bytes) -> None:
        self.link.send((_PREFIX.pack(ACK, len(slots), 0), slots))

    # --- receiving ---------------------------------------------------------------------------------------------------
    def _on_release(self, slot: int) -> None:
        self._bytes_in -= self._received.pop(slot, 0)

    def close(self) -> None:
        self._sent.clear()
        self._arrived.clear()
        self._partial = None
        if self.device is not None:
            self.device.close(peer_closed=True)  # its slab was never announced
            self.device = None
        self.link.close()

    def _receive(self) -> None:
        taken = 0
        try:
            while not self.link.lost and (taken < TURN_BYTES or self.link.pending):
                taken += self._read()
                if self.link.drained:
                    return
        except MALFORMED:
            self.link.abandon()

    def _read(self) -> int:
        """Take what one system call gives; returns the bytes."""
        if self._partial is None:
            if BUFFER_BYTES - self._end < READ_BYTES:
                rest = self._end - self._start
                self._buffer[:rest] = bytes(self._buffer[self._start : self._end])
                self._start, self._end = 0, rest
            count = self.link.read((self._buffer[self._end : self._end + READ_BYTES],))
            self._end += count
            self._parse()
            return count
        kind, header, payload = self._partial  # the buffer is empty: what follows comes with the same call
        missing = len(payload) - self._filled
        count = self.link.read((payload[self._filled :], self._buffer[:READ_BYTES]))
        self._filled += min(count, missing)
        if count >= missing:
            self._partial = None
            self._start, self._end = 0, count - missing
            self._on_frame(kind, header, payload)
            self._parse()
        return count

    def _parse(self) -> None:
        """Take the frames out of the buffer, up to the first that is not complete."""
        while self._end - self._start >= _PREFIX.size:
            kind, header_bytes, nbytes = _PREFIX.unpack_from(self._buffer, self._start)
            if header_bytes > PACKET_BYTES:
                raise ValueError(f"a header must be at most {PACKET_BYTES} bytes (got {header_bytes})")
            at = self._start + _PREFIX.size + header_bytes
            if self._end < at + (nbytes if nbytes <= INLINE_BYTES else 0):
                return
            header = bytes(self._buffer[at - header_bytes : at])
            if nbytes <= INLINE_BYTES:
                self._start = at + nbytes
                self._on_frame(kind, header, memoryview(bytes(self._buffer[at : self._start])))
                continue
            payload = self._allocate(kind, nbytes)
            there = min(self._end - at, nbytes)
            payload[:there] = self._buffer[at : at + there]
            self._start = at + there
            if there < nbytes:
                self._partial, self._filled = (kind, header, payload), there
                break
            self._on_frame(kind, header, payload)
        if self._start == self._end:
            self._start = self._end = 0

    def _allocate(self, kind: bytes, nbytes: int) -> memoryview:
        """Memory for a payload; raises ValueError for more than the peer may send now."""
        if kind == MESSAGE and nbytes > MESSAGE_BYTES:
            raise ValueError(f"message must be at most {MESSAGE_BYTES} bytes (got {nbytes})")
        if nbytes > PAYLOAD_BYTES or (kind == CHUNK and self._bytes_in and self._bytes_in + nbytes > WINDOW_BYTES):
            raise ValueError(f"{nbytes} bytes beside {self._bytes_in} that are not acknowledged")
        return np.empty(nbytes, np.uint8).data  # of the heap: zeroing or fresh pages would double the cost

    def _on_frame(self, kind: bytes, header: bytes, payload: memoryview) -> None:
        if kind == CHUNK:
            self._arrived.append(self._chunk(decode_header(header), payload.toreadonly()))
        elif kind == ACK and not payload:
            for (slot,) in U32.iter_unpack(header):
                if slot in self._sent:
                    key, counted = self._sent.pop(slot)
                    self.credits.give(key)
                    self._bytes_out -= counted
        elif kind == MESSAGE and not header:
            self._arrived.append(bytes(payload))
        else:
            raise ValueError(f"unknown frame kind {kind!r}")

    def _chunk(self, header: Header, payload: memoryview) -> Chunk:
        if header.nbytes != len(payload) or header.slot in self._received:
            raise ValueError("a payload of another length, or a slot that is in use")
        if any(device != "cpu" for _, device, _ in header.tensors):
            raise ValueError("a GPU tensor on a TCP link")
        tensors = tuple(Tensor(spec, part_of(payload, at, spec.nbytes)) for spec, _, at in header.tensors)
        self._received[header.slot] = counted = len(payload) if len(payload) > INLINE_BYTES else 0
        self._bytes_in += counted
        # no time: another host has another clock
        return Chunk(header.run, header.edge, header.index, header.last, tensors, header.piece, header.slot)
