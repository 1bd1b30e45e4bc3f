# SPDX-License-Identifier: Apache-2.0
"""What all carriers of chunks have in common: a chunk's header, the layout of its tensors, and half of a connector."""

from __future__ import annotations

import contextlib
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec

from triton_omni.backends.connectors.base import LINK_CHUNKS, Credits, PeerLost
from triton_omni.backends.connectors.device import DevicePath
from triton_omni.backends.core.chunk import Chunk, Tensor, TensorSpec
from triton_omni.backends.core.outputs import OutputPiece

TENSOR_ALIGN = 64  # a cache line, and enough for any vector load
MESSAGE, CHUNK, ACK = b"M", b"D", b"A"
U32 = struct.Struct("<I")
_GAP = bytes(TENSOR_ALIGN)

Buffer = bytes | bytearray | memoryview
Layout = list[tuple[Tensor, int, int]]
"""Tensors in one payload: each with its offset and its size in bytes."""


class Header(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Descriptor of a chunk. `tensors` holds (spec, device, offset in its payload); `location` is the carrier's."""

    slot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    run: bytes
    edge: str
    index: int
    last: bool
    piece: OutputPiece | None
    tensors: list[tuple[TensorSpec, str, int]]
    location: int
    offset: int
    nbytes: int
    device_offset: int = -1
    sent_s: float = 0.0


MALFORMED = (
    msgspec.MsgspecError, struct.error, LookupError, ValueError, ArithmeticError, RuntimeError, OSError, MemoryError,
)  # fmt: skip
"""Raised while reading what is malformed (RuntimeError: too deeply nested), too large, or whose GPU memory is gone."""

encode_header = msgspec.msgpack.Encoder().encode
decode_header = msgspec.msgpack.Decoder(Header).decode


class CarrierLink(Protocol):
    """The socket of a connector; sends what the kernel cannot take now later."""

    socket: socket.socket
    lost: bool
    joining: bool

    @property
    def trusted(self) -> bool: ...
    @property
    def backlog_packets(self) -> int: ...
    @property
    def wants_write(self) -> bool: ...
    def fileno(self) -> int: ...
    def send(self, parts: Sequence[Buffer]) -> None: ...
    def send_held(self) -> None: ...
    def flush(self) -> None: ...


AnyLink = TypeVar("AnyLink", bound=CarrierLink)


class LinkConnector(ABC, Generic[AnyLink]):
    """The part of a connector that does not depend on how a payload travels. Used by one thread."""

    def __init__(self, link: AnyLink, device: DevicePath | None, credits: Credits | None) -> None:
        self.link = link
        self.credits = credits or Credits()
        self.device = device
        self._next_slot = 0
        self._released: list[int] = []
        self._arrived: deque[Chunk | bytes] = deque()

    def fileno(self) -> int:
        return self.link.fileno()

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Number of chunks put and not yet acknowledged."""

    @property
    def buffered(self) -> bool:
        """True if `get` has an item without asking the kernel, so that no readiness event will announce it."""
        return bool(self._arrived)

    def get(self) -> Chunk | bytes | None:
        if not self._arrived:
            self._receive()
        if self._arrived:
            return self._arrived.popleft()
        if self.link.lost:
            raise PeerLost("the peer is gone")
        return None

    def release(self, chunk: Chunk) -> None:
        if chunk.slot is None:
            return
        self._released.append(chunk.slot)
        self._on_release(chunk.slot)
        chunk.slot = None
        chunk.tensors = ()
        if not self.link.joining or len(self._released) >= LINK_CHUNKS:
            self._acknowledge()

    def send_held(self) -> None:
        """End of joining: send held packets, acknowledgements as one."""
        if self._released:
            self._acknowledge()
        self.link.send_held()

    def flush(self) -> None:
        """Send what waits in user space, as far as the kernel accepts it."""
        self.link.flush()

    def _acknowledge(self) -> None:
        slots, self._released = self._released, []
        with contextlib.suppress(PeerLost):  # a dead sender needs no acknowledgement; `get` reports the loss
            self._send_acknowledgement(struct.pack(f"<{len(slots)}I", *slots))

    def _header(
        self,
        chunk: Chunk,
        tensors: list[tuple[TensorSpec, str, int]],
        nbytes: int,
        location: int = 0,
        offset: int = 0,
        device_offset: int = -1,
    ) -> Header:
        """The header of the next chunk."""
        return Header(
            slot=self._next_slot,
            run=chunk.run,
            edge=chunk.edge,
            index=chunk.index,
            last=chunk.last,
            piece=chunk.piece,
            tensors=tensors,
            location=location,
            offset=offset,
            nbytes=nbytes,
            device_offset=device_offset,
            sent_s=chunk.sent_s,
        )

    def _in_host_memory(self, layout: Layout) -> Layout:
        """The layout with copies of its GPU tensors, valid until the next call."""
        on_device = [tensor for tensor, _, _ in layout if tensor.device != "cpu"]
        if not on_device:
            return layout
        copies = iter(self.device.store.to_host(on_device) if self.device else [t.on_host() for t in on_device])
        return [(t if t.device == "cpu" else next(copies), at, nbytes) for t, at, nbytes in layout]

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _receive(self) -> None:
        """Read what the kernel has, into `_arrived`. What is malformed ends the link; items before it are kept."""

    @abstractmethod
    def _on_release(self, slot: int) -> None:
        """The consumer no longer touches the chunk in `slot`."""

    @abstractmethod
    def _send_acknowledgement(self, slots: bytes) -> None:
        """Send released slot numbers (u32 each); raises PeerLost."""


def lay_out(tensors: Sequence[Tensor]) -> tuple[Layout, int]:
    """Aligned offsets for `tensors` in one payload, and its size in bytes."""
    placed: Layout = []
    end = 0
    for tensor in tensors:
        nbytes = tensor.spec.nbytes
        start = -(-end // TENSOR_ALIGN) * TENSOR_ALIGN if nbytes else end
        placed.append((tensor, start, nbytes))
        end = start + nbytes
    return placed, end


def part_of(payload: memoryview, offset: int, nbytes: int) -> memoryview:
    """`nbytes` of a payload from `offset` on; raises ValueError if they are not all inside it."""
    if not 0 <= offset <= offset + nbytes <= len(payload):
        raise ValueError(f"bytes {offset} to {offset + nbytes} of a payload of {len(payload)}")
    return payload[offset : offset + nbytes]


def copy_to(target: memoryview, offset: int, layout: Layout) -> None:
    """Copy tensors to their offsets, from `offset` on: the one copy of a hop."""
    for tensor, at, nbytes in layout:
        if nbytes:
            target[offset + at : offset + at + nbytes] = memoryview(tensor.data).cast("B")


def in_a_row(layout: Layout) -> list[Buffer]:
    """A payload in parts: the tensors' bytes and the gaps that align them."""
    parts: list[Buffer] = []
    end = 0
    for tensor, at, nbytes in layout:
        if not nbytes:
            continue
        data = memoryview(tensor.data).cast("B")
        if len(data) != nbytes:
            raise ValueError(f"tensor '{tensor.name}' must have {nbytes} bytes (got {len(data)})")
        if at > end:
            parts.append(_GAP[: at - end])
        parts.append(data)
        end = at + nbytes
    return parts
