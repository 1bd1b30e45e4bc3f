# SPDX-License-Identifier: Apache-2.0
"""Chunks between two processes of one host: descriptors over a unix socket, payloads in shared memory.

* up to INLINE_BYTES the payload travels inside the packet;
* larger ones go into a memfd slab per link and direction, handed over once with SCM_RIGHTS. It has no name in
  /dev/shm, so nothing can leak by name, not even after kill -9;
* larger than half the slab: a memfd of its own that travels with the chunk;
* tensors on a GPU go into a device slab (cuda_ipc.py) where both ends can map it; elsewhere they are copied to host
  memory, pinned if there is a device store.

A packet is one kind byte, then for a message its bytes, for an acknowledgement slot numbers, for a chunk the length
of its header, the header (msgpack) and the inline payload.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence

from triton_omni.backends.connectors.base import INLINE_BYTES, MESSAGE_BYTES, Credits, PeerLost
from triton_omni.backends.connectors.carrier import (
    ACK,
    CHUNK,
    MALFORMED,
    MESSAGE,
    U32,
    Header,
    Layout,
    LinkConnector,
    copy_to,
    decode_header,
    encode_header,
    in_a_row,
    lay_out,
    part_of,
)
from triton_omni.backends.connectors.device import DevicePath, DeviceStore
from triton_omni.backends.connectors.link import Link, close_all
from triton_omni.backends.connectors.slab import Extents
from triton_omni.backends.core.chunk import Chunk, Tensor, TensorSpec

SLAB_BYTES = 64 << 20  # virtual; the kernel backs only pages that were written
BACKLOG_PACKETS = 64  # packets waiting in user space above which `put` returns False

LONG_MESSAGE, SLAB = b"L", b"S"
DEVICE, DEVICE_ANSWER = b"G", b"R"  # a slab of GPU memory; whether it could be opened: "" or the reason why not
MAX_REASON_BYTES = 1000
LONG_MESSAGE_BYTES = 32 << 10  # longer messages (a chat's whole history) travel in a memfd of their own
INLINE, IN_SLAB, ONE_SHOT, NO_PAYLOAD = range(4)
_KIND_AND_LENGTH = struct.Struct("<cI")


class _Memfd:
    """A memfd and its mapping; raises OSError where descriptors or memory are short."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("triton-omni", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes)
            self.map = mmap.mmap(self.fd, nbytes)
        except OSError:
            os.close(self.fd)
            raise
        self.view = memoryview(self.map)

    def close(self) -> None:
        os.close(self.fd)
        self.view.release()
        self.map.close()


class ShmConnector(LinkConnector[Link]):
    """One end of a link between two processes of one host."""

    def __init__(self, link: Link, device_store: DeviceStore | None = None, credits: Credits | None = None) -> None:
        super().__init__(link, DevicePath(device_store) if device_store is not None else None, credits)
        self._slab: _Memfd | None = None
        self._extents = Extents(SLAB_BYTES)
        self._peer_slab: mmap.mmap | None = None
        self._sent: dict[int, tuple[tuple[bytes, str], int, int]] = {}
        """Slot → what its acknowledgement gives back: a credit, offsets in the slab and on the device (-1: none)."""
        self._device_slots: set[int] = set()
        """Slots of received chunks with views on the peer's device slab."""
        self._must_settle = False

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    # --- sending -----------------------------------------------------------------------------------------------
    def send(self, message: bytes) -> None:
        if len(message) > MESSAGE_BYTES:
            raise ValueError(f"message must be at most {MESSAGE_BYTES} bytes (got {len(message)})")
        if len(message) <= LONG_MESSAGE_BYTES:
            self.link.send((MESSAGE, message))
            return
        memfd = _Memfd(len(message))
        try:
            memfd.view[:] = message
            self.link.send((LONG_MESSAGE, U32.pack(len(message))), (memfd.fd,))
        finally:
            memfd.close()

    def put(self, chunk: Chunk) -> bool:
        if self.link.lost:
            raise PeerLost("the peer is gone")
        key = (chunk.run, chunk.edge)
        if self.link.backlog_packets >= BACKLOG_PACKETS or not self.credits.free(key):
            return False
        on_device, on_host, device_offset = self._split(chunk)
        layout, nbytes = lay_out(on_host)
        device_layout, _ = lay_out(on_device)
        offset, memfd = -1, None
        try:
            location, offset, memfd = self._reserve(nbytes)
            if location is None:
                self._free(-1, device_offset)
                return False
            tensors = [(t.spec, "cpu", at) for t, at, _ in layout]
            tensors += [(t.spec, t.device, at) for t, at, _ in device_layout]
            header = self._header(chunk, tensors, nbytes, location, max(offset, 0), device_offset)
            if self.device is not None and device_layout:
                self.device.store.write([(device_offset + at, tensor) for tensor, at, _ in device_layout])
            self._transmit(header, self._in_host_memory(layout), memfd)
        except BaseException:  # a chunk that cannot be sent (not encodable, too long a header) holds nothing
            self._free(offset, device_offset)
            raise
        finally:
            if memfd is not None:
                memfd.close()
        self._sent[self._next_slot] = key, offset, device_offset
        self._next_slot = (self._next_slot + 1) & 0xFFFFFFFF
        self.credits.take(key)
        return True

    def _split(self, chunk: Chunk) -> tuple[Sequence[Tensor], Sequence[Tensor], int]:
        """(tensors for the device slab, tensors for the host payload, offset in the device slab or -1)."""
        on_device = [t for t in chunk.tensors if t.device != "cpu"]
        if not on_device or self.device is None:
            return (), chunk.tensors, -1
        announcement = self.device.announcement()
        if announcement is not None:
            self.link.send((DEVICE, announcement))
        offset = self.device.alloc(lay_out(on_device)[1])
        if offset is None:
            return (), chunk.tensors, -1
        return on_device, [t for t in chunk.tensors if t.device == "cpu"], offset

    def _reserve(self, nbytes: int) -> tuple[int | None, int, _Memfd | None]:
        """Reserve room for a payload: (location, offset in the slab, one-shot memfd). Location None: no room now."""
        if nbytes == 0:
            return NO_PAYLOAD, -1, None
        if nbytes <= INLINE_BYTES:
            return INLINE, -1, None
        if nbytes > SLAB_BYTES // 2:
            return ONE_SHOT, -1, _Memfd(nbytes)
        if self._slab is None:
            slab = _Memfd(SLAB_BYTES)
            try:
                self.link.send((SLAB,), (slab.fd,))
            except OSError:
                slab.close()
                raise
            self._slab = slab
        offset = self._extents.alloc(nbytes)
        return (None, -1, None) if offset is None else (IN_SLAB, offset, None)

    def _transmit(self, header: Header, layout: Layout, memfd: _Memfd | None) -> None:
        """Write the host payload where `header` says and send the descriptor."""
        encoded = encode_header(header)
        front = (_KIND_AND_LENGTH.pack(CHUNK, len(encoded)), encoded)
        if header.location == INLINE:
            self.link.send((*front, *in_a_row(layout)))
        elif memfd is not None:
            copy_to(memfd.view, 0, layout)
            self.link.send(front, (memfd.fd,))
        else:
            if header.location == IN_SLAB:
                assert self._slab is not None
                copy_to(self._slab.view, header.offset, layout)
            self.link.send(front)

    # --- receiving ---------------------------------------------------------------------------------------------
    def _on_release(self, slot: int) -> None:
        if slot in self._device_slots:
            self._device_slots.discard(slot)
            self._must_settle = True

    def _send_acknowledgement(self, slots: bytes) -> None:
        if self._must_settle and self.device is not None:
            self._must_settle = False
            self.device.store.settle()
        self.link.send((ACK, slots))

    def close(self) -> None:
        self._sent.clear()
        self._arrived.clear()
        if self.device is not None:
            self.device.close(self.link.peer_closed)  # before EOF tells the peer that its slab is unmapped here
            self.device = None
        self.link.close()
        self._peer_slab = None  # unmapped when the last chunk that uses it is dropped
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    def _receive(self) -> None:
        """Read what the kernel has. A malformed packet ends the link; packets after it are dropped."""
        well_formed = True
        for packet, fds in self.link.receive():
            try:
                if well_formed:
                    self._on_packet(memoryview(packet), fds)
            except MALFORMED:
                well_formed = False
                self.link.abandon()
            finally:
                if fds:
                    close_all(fds)

    def _on_packet(self, packet: memoryview, fds: Sequence[int]) -> None:
        kind, body = bytes(packet[:1]), packet[1:]
        if kind == CHUNK:
            self._arrived.append(self._chunk(body, fds))
        elif kind == ACK:
            for (slot,) in U32.iter_unpack(body):
                self._acknowledged(slot)
        elif kind == MESSAGE:
            self._arrived.append(bytes(body))
        elif kind == LONG_MESSAGE:
            length = U32.unpack(body)[0]
            if length > MESSAGE_BYTES:
                raise ValueError(f"message must be at most {MESSAGE_BYTES} bytes (got {length})")
            with mmap.mmap(fds[0], length, prot=mmap.PROT_READ) as mapping:
                self._arrived.append(mapping[:])
        elif kind == SLAB:
            self._peer_slab = mmap.mmap(fds[0], SLAB_BYTES, prot=mmap.PROT_READ)
        elif kind == DEVICE and self.device is not None:
            refusal = self.device.attach(bytes(body))
            with contextlib.suppress(PeerLost):  # `get` reports the loss
                self.link.send((DEVICE_ANSWER, refusal.encode()[:MAX_REASON_BYTES]))
        elif kind == DEVICE_ANSWER and self.device is not None:
            self.device.on_answer(bytes(body).decode(errors="replace"))
        else:
            raise ValueError(f"unknown packet kind {kind!r}")

    def _acknowledged(self, slot: int) -> None:
        if slot in self._sent:
            key, slab_offset, device_offset = self._sent.pop(slot)
            self.credits.give(key)
            self._free(slab_offset, device_offset)

    def _free(self, slab_offset: int, device_offset: int) -> None:
        """Free the slab extents of a chunk."""
        if slab_offset >= 0:
            self._extents.free(slab_offset)
        if device_offset >= 0 and self.device is not None:
            self.device.store.free(device_offset)

    def _chunk(self, body: memoryview, fds: Sequence[int]) -> Chunk:
        end = 4 + U32.unpack_from(body)[0]
        header = decode_header(body[4:end])
        payload = body[end:]
        if header.location == IN_SLAB:
            if self._peer_slab is None:
                raise ValueError("a slab payload before the slab")
            payload = part_of(memoryview(self._peer_slab), header.offset, header.nbytes)
        elif header.location == ONE_SHOT:  # unmapped when the last view of it is gone
            payload = memoryview(mmap.mmap(fds[0], header.nbytes, prot=mmap.PROT_READ))
        tensors = [
            Tensor(spec, part_of(payload, at, spec.nbytes))
            if device == "cpu"
            else self._device_tensor(header, spec, at)
            for spec, device, at in header.tensors
        ]
        if header.device_offset >= 0:
            self._device_slots.add(header.slot)
        return Chunk(
            header.run, header.edge, header.index, header.last, tuple(tensors), header.piece, header.slot, header.sent_s
        )

    def _device_tensor(self, header: Header, spec: TensorSpec, at: int) -> Tensor:
        if self.device is None:
            raise ValueError("a GPU tensor for an end without a device store")
        return self.device.store.read(header.device_offset + at, spec)
