# SPDX-License-Identifier: Apache-2.0
"""The contract of a connector in code: every carrier passes every check of `CHECKS`.

A carrier says how to make two connected ends; the checks know nothing else about it.

    @pytest.mark.parametrize("check", CHECKS, ids=check_name)
    def test_contract(check):
        check(MY_CARRIER)
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triton_omni.backends.connectors.base import LINK_CHUNKS, MESSAGE_BYTES, WINDOW_CHUNKS, Connector, PeerLost
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.outputs import ImagePiece, TextPiece

PATIENCE_S = 20.0
INLINE_EDGES = (0, 1, 8191, 8192, 8193)
SIZES = (*INLINE_EDGES, 64 << 10, 1 << 20)


@dataclass(frozen=True)
class Carrier:
    """How to make two connected ends.

    pair        (window, limit) → context manager of two ends, closed when it is left
    tensor      makes a tensor of this carrier's device from a numpy array
    read        a received tensor's bytes
    slab_bytes  size of its shared memory per direction; 0: unbounded
    outlives    bytes that were sent can still be read when their sender is gone
    """

    name: str
    pair: Callable[[int, int], AbstractContextManager[tuple[Any, Any]]]
    tensor: Callable[[str, np.ndarray], Tensor] = Tensor.of
    read: Callable[[Tensor], bytes] = lambda tensor: bytes(tensor.data)
    slab_bytes: int = 0
    outlives: bool = True

    def ends(self, window: int = WINDOW_CHUNKS, limit: int = LINK_CHUNKS) -> AbstractContextManager[tuple[Any, Any]]:
        return self.pair(window, limit)


def take(end: Any, *senders: Any) -> Chunk | bytes:
    """The next item, waiting for it as a loop would; `senders` are flushed meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while (item := end.get()) is None:
        assert time.monotonic() < deadline, "nothing arrived"
        for sender in senders:
            flush(sender)
        if hasattr(end, "fileno"):
            select.select([end], [], [], 0.05)
        else:
            raise AssertionError("nothing arrived")
    return item


def take_chunk(end: Any, *senders: Any) -> Chunk:
    item = take(end, *senders)
    assert isinstance(item, Chunk)
    return item


def flush(end: Any) -> None:
    """Hand over what waits in user space, if the carrier has such a place."""
    if hasattr(end, "flush"):
        with contextlib.suppress(PeerLost):
            end.flush()


def settle(end: Any, sender: Any) -> None:
    """Let `end` see acknowledgements: nothing else may have arrived."""
    deadline = time.monotonic() + PATIENCE_S
    while end.credits.total:
        assert end.get() is None
        flush(sender)
        assert time.monotonic() < deadline, "a credit never came back"


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def named_shm(pid: int | str = "self") -> list[str]:
    """Mappings of /dev/shm in a process: a carrier that uses names there can leak them."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    """Bytes that are different for every size and seed, and at both ends."""
    block = (np.arange(65_521) * 31 + seed * 97 + nbytes) % 251
    return np.resize(block.astype(np.uint8), nbytes)


def chunk_of(carrier: Carrier, nbytes: int, run: bytes = b"r" * 16, index: int = 0, **more: Any) -> Chunk:
    return Chunk(run, "e", index, tensors=(carrier.tensor("x", pattern(nbytes, index)),), **more)


def number(n: int) -> TextPiece:
    """A piece that says a number."""
    return TextPiece(token_ids=(n,))


# --- checks ------------------------------------------------------------------------------------------------------
def arrives_as_sent(carrier: Carrier) -> None:
    with carrier.ends() as (a, b):
        for index, nbytes in enumerate(SIZES):
            assert a.put(chunk_of(carrier, nbytes, index=index, last=nbytes == SIZES[-1], piece=number(nbytes)))
            got = take_chunk(b, a)
            assert (got.run, got.edge, got.index, got.piece) == (b"r" * 16, "e", index, number(nbytes))
            assert got.last == (nbytes == SIZES[-1])
            assert got.tensors[0].spec.shape == (nbytes,)
            assert got.tensors[0].spec.dtype == "uint8"
            assert carrier.read(got.tensors[0]) == pattern(nbytes, index).tobytes()
            b.release(got)
        settle(a, b)


def both_directions_are_independent(carrier: Carrier) -> None:
    with carrier.ends() as (a, b):
        assert a.put(chunk_of(carrier, 100_000))
        assert b.put(chunk_of(carrier, 200_000, index=1))
        at_b, at_a = take_chunk(b, a), take_chunk(a, b)
        assert carrier.read(at_b.tensors[0]) == pattern(100_000).tobytes()
        assert carrier.read(at_a.tensors[0]) == pattern(200_000, 1).tobytes()
        a.release(at_a)
        b.release(at_b)
        settle(a, b)
        settle(b, a)


def order_is_kept_between_messages_and_chunks(carrier: Carrier) -> None:
    with carrier.ends(window=100) as (a, b):
        sent: list[Any] = []
        for i in range(60):
            if i % 3 == 0:
                a.send(b"m%d" % i)
                sent.append(b"m%d" % i)
            else:
                assert a.put(chunk_of(carrier, (50, 20_000)[i % 2], index=i))
                sent.append(i)
        for expected in sent:
            item = take(b, a)
            assert (item.index if isinstance(item, Chunk) else item) == expected
            if isinstance(item, Chunk):
                b.release(item)


def window_bounds_each_run_and_edge(carrier: Carrier) -> None:
    with carrier.ends(window=3) as (a, b):
        for index in range(3):
            assert a.put(chunk_of(carrier, 10, index=index))
        assert not a.put(chunk_of(carrier, 10, index=3))
        assert a.put(chunk_of(carrier, 10, run=b"s" * 16)), "another run has its own window"
        assert a.put(Chunk(b"r" * 16, "other")), "another edge has its own window"
        a.send(b"messages need no credit")
        first = take_chunk(b, a)
        b.release(first)
        got = [take(b, a) for _ in range(5)]
        assert a.get() is None  # sees the acknowledgement
        assert a.put(chunk_of(carrier, 10, index=3)), "one release, one credit"
        assert not a.put(chunk_of(carrier, 10, index=4))
        for item in [*got, take(b, a)]:
            if isinstance(item, Chunk):
                b.release(item)
        settle(a, b)
        assert not a.credits.used


def limit_bounds_the_link(carrier: Carrier) -> None:
    with carrier.ends(window=4, limit=10) as (a, b):
        taken = 0
        while a.put(chunk_of(carrier, 10, run=bytes([taken]) * 16)):
            taken += 1
        assert taken == 10
        for _ in range(10):
            b.release(take_chunk(b, a))
        settle(a, b)
        assert a.put(chunk_of(carrier, 10))
        b.release(take_chunk(b, a))


def release_counts_once(carrier: Carrier) -> None:
    with carrier.ends(window=2) as (a, b):
        assert a.put(chunk_of(carrier, 9_000))
        assert a.put(chunk_of(carrier, 9_000, index=1))
        got = take_chunk(b, a)
        for _ in range(3):
            b.release(got)
        assert got.tensors == (), "released bytes can no longer be reached"
        assert a.get() is None
        assert a.put(chunk_of(carrier, 9_000, index=2))
        assert not a.put(chunk_of(carrier, 9_000, index=3)), "three releases of one chunk gave one credit"
        b.release(take_chunk(b, a))
        b.release(take_chunk(b, a))
        settle(a, b)
        b.release(Chunk(b"r" * 16, "e"))  # made here, not received: nothing to give back
        assert a.get() is None


def releases_may_come_in_any_order(carrier: Carrier) -> None:
    with carrier.ends(window=16) as (a, b):
        for i in range(16):
            assert a.put(chunk_of(carrier, 30_000, index=i))
        held = [take_chunk(b, a) for _ in range(16)]
        for i in (5, 1, 15, 0, 8, 7, 3, 2, 14, 10, 9, 4, 6, 13, 12, 11):
            assert carrier.read(held[i].tensors[0]) == pattern(30_000, i).tobytes(), "a neighbour's release hurt it"
            b.release(held[i])
        settle(a, b)


def falsy_payloads_are_payloads(carrier: Carrier) -> None:
    with carrier.ends() as (a, b):
        empty = np.zeros((0, 8), np.float32)
        assert a.put(Chunk(b"r" * 16, "e", 0, tensors=(carrier.tensor("empty", empty),)))
        assert a.put(Chunk(b"r" * 16, "e", 1, last=True))
        mixed = (carrier.tensor("empty", empty), carrier.tensor("x", pattern(3)), carrier.tensor("none", empty))
        assert a.put(Chunk(b"r" * 16, "e", 2, tensors=mixed, piece=ImagePiece()))
        a.send(b"")
        first, second, third = take_chunk(b, a), take_chunk(b, a), take_chunk(b, a)
        assert first.tensors[0].spec.shape == (0, 8)
        assert carrier.read(first.tensors[0]) == b""
        assert second.last and second.tensors == () and second.piece is None
        assert [t.name for t in third.tensors] == ["empty", "x", "none"]
        assert carrier.read(third.tensors[1]) == pattern(3).tobytes()
        assert third.piece == ImagePiece()
        assert take(b, a) == b""
        for chunk in (first, second, third):
            b.release(chunk)
        settle(a, b)


def many_tensors_of_many_kinds(carrier: Carrier) -> None:
    arrays = {
        "float32": np.linspace(-1, 1, 999, dtype=np.float32).reshape(3, 333),
        "float16": np.ones((7,), np.float16),
        "int64": np.array([[-(2**62)]], np.int64),
        "bool": np.array([True, False, True]),
        "uint8": pattern(12_345).reshape(5, 2469),
        "scalar": np.array(3.5, np.float64),
    }
    arrays |= {f"t{i}": np.full((i % 5, 3), i, np.int32) for i in range(100)}
    with carrier.ends() as (a, b):
        assert a.put(Chunk(b"r" * 16, "e", tensors=tuple(carrier.tensor(n, v) for n, v in arrays.items())))
        got = take_chunk(b, a)
        assert [t.name for t in got.tensors] == list(arrays)
        for tensor in got.tensors:
            want = arrays[tensor.name]
            assert (tensor.spec.dtype, tensor.spec.shape) == (str(want.dtype), want.shape)
            assert carrier.read(tensor) == want.tobytes()
        b.release(got)
        settle(a, b)


def the_producer_may_reuse_its_buffer(carrier: Carrier) -> None:
    with carrier.ends() as (a, b):
        for nbytes in (100, 100_000):
            buffer = pattern(nbytes).copy()
            assert a.put(Chunk(b"r" * 16, "e", tensors=(carrier.tensor("x", buffer),)))
            buffer[:] = 0
            got = take_chunk(b, a)
            assert carrier.read(got.tensors[0]) == pattern(nbytes).tobytes()
            b.release(got)
        settle(a, b)


def long_messages_arrive_whole(carrier: Carrier) -> None:
    with carrier.ends() as (a, b):
        for nbytes in (32 << 10, (32 << 10) + 1, 3 << 20, MESSAGE_BYTES):
            a.send(pattern(nbytes).tobytes())
            assert take(b, a) == pattern(nbytes).tobytes()
        with pytest.raises(ValueError, match="message must be at most"):
            a.send(bytes(MESSAGE_BYTES + 1))


def a_burst_of_messages_is_not_lost(carrier: Carrier) -> None:
    """More than a socket buffer takes: what waits in user space is bounded for chunks only."""
    with carrier.ends() as (a, b):
        for i in range(3_000):
            a.send(b"%06d" % i + bytes(1000))
        for i in range(3_000):
            item = take(b, a)
            assert isinstance(item, bytes)
            assert item[:6] == b"%06d" % i


def a_full_pipe_says_not_now_and_recovers(carrier: Carrier) -> None:
    """Many runs fill the pipe; every chunk taken arrives, every chunk refused may be offered again."""
    with carrier.ends(window=1) as (a, b):
        runs = [i.to_bytes(16, "big") for i in range(800)]
        waiting, got = list(runs), []
        deadline = time.monotonic() + PATIENCE_S
        while len(got) < len(runs):
            while waiting and a.put(chunk_of(carrier, 8_000, run=waiting[0])):
                waiting.pop(0)
            item = take_chunk(b, a)
            assert carrier.read(item.tensors[0]) == pattern(8_000).tobytes()
            got.append(item.run)
            b.release(item)
            assert a.get() is None
            assert time.monotonic() < deadline
        assert got == runs


def a_full_slab_says_not_now_and_recovers(carrier: Carrier) -> None:
    if not carrier.slab_bytes:
        return  # this carrier has no slab
    piece = carrier.slab_bytes // 4
    with carrier.ends(window=100) as (a, b):
        for index in range(4):
            assert a.put(chunk_of(carrier, piece, index=index))
        assert not a.put(chunk_of(carrier, piece, index=4))
        assert a.put(chunk_of(carrier, 100, index=4)), "small chunks need no slab"
        assert a.credits.total == 5, "a refused chunk holds no credit"
        for index in range(4):
            got = take_chunk(b, a)
            assert carrier.read(got.tensors[0])[:64] == pattern(piece, index)[:64].tobytes()
            b.release(got)
        b.release(take_chunk(b, a))
        settle(a, b)
        assert a.put(chunk_of(carrier, piece * 2, index=5)), "freed extents join up again"
        b.release(take_chunk(b, a))


def larger_than_the_slab_takes_another_way(carrier: Carrier) -> None:
    nbytes = (carrier.slab_bytes or (8 << 20)) // 2 + 1
    with carrier.ends() as (a, b):
        before = open_fds()
        assert a.put(chunk_of(carrier, nbytes, piece=number(1)))
        got = take_chunk(b, a)
        assert carrier.read(got.tensors[0]) == pattern(nbytes).tobytes()
        b.release(got)
        settle(a, b)
        assert open_fds() <= before + 3, "at most what stands ready for the next chunk"


def what_arrived_before_the_close_is_delivered(carrier: Carrier) -> None:
    if not carrier.outlives:
        return
    with carrier.ends() as (a, b):
        assert a.put(chunk_of(carrier, 50_000))
        a.send(b"bye")
        b.send(b"never read: an unread message must not hide what was sent")
        a.close()
        got = take_chunk(b)
        assert carrier.read(got.tensors[0]) == pattern(50_000).tobytes()
        assert take(b) == b"bye"
        for _ in range(2):
            with pytest.raises(PeerLost):
                take(b)
        with pytest.raises(PeerLost):
            b.put(chunk_of(carrier, 1))
        with pytest.raises(PeerLost):
            b.send(b"anyone?")
        assert carrier.read(got.tensors[0]) == pattern(50_000).tobytes(), "held bytes outlive the sender"
        b.release(got)


def sending_to_a_closed_peer_still_delivers_what_it_sent(carrier: Carrier) -> None:
    if not carrier.outlives:
        return
    with carrier.ends() as (a, b):
        assert a.put(chunk_of(carrier, 50_000))
        a.close()
        with contextlib.suppress(PeerLost):
            b.send(b"x")
        with contextlib.suppress(PeerLost):
            b.put(chunk_of(carrier, 100_000))
        assert carrier.read(take_chunk(b).tensors[0]) == pattern(50_000).tobytes()
        with pytest.raises(PeerLost):
            take(b)


def closing_leaves_nothing_behind(carrier: Carrier) -> None:
    fds, names = open_fds(), named_shm()  # other libraries of a whole test run hold names of their own
    for _ in range(5):
        with carrier.ends() as (a, b):
            for nbytes in (10, 100_000, (carrier.slab_bytes or (1 << 20)) // 2 + 1):
                assert a.put(chunk_of(carrier, nbytes))
            a.send(bytes(100_000))
            got = take_chunk(b, a)
            assert named_shm() == names
            a.close()
            for _ in range(2):
                with contextlib.suppress(PeerLost):
                    b.send(bytes(100_000))
                with contextlib.suppress(PeerLost):
                    b.put(chunk_of(carrier, (carrier.slab_bytes or (1 << 20)) // 2 + 1))
            b.release(got)
    assert open_fds() == fds


def a_bad_chunk_hurts_only_itself(carrier: Carrier) -> None:
    """What cannot be sent raises and holds nothing: no credit, no room; the link goes on."""
    with carrier.ends(window=2) as (a, b):
        before = open_fds()
        for bad in (
            Chunk(b"r" * 16, "e", piece=TextPiece(text=object())),  # type: ignore[arg-type]
            Chunk(b"r" * 16, "e", tensors=(carrier.tensor("x", pattern(100_000)),), piece=TextPiece("x" * (1 << 18))),
        ):
            for _ in range(5):
                with pytest.raises((TypeError, ValueError)):
                    a.put(bad)
        assert a.credits.total == 0
        if carrier.slab_bytes:
            assert a.put(chunk_of(carrier, carrier.slab_bytes // 2)), "a failed put keeps no room"
            assert a.put(chunk_of(carrier, carrier.slab_bytes // 2, index=1))
            for _ in range(2):
                b.release(take_chunk(b, a))
            settle(a, b)
        assert open_fds() <= before + 3, "the slab: its memfd and two mappings"


CHECKS: tuple[Callable[[Carrier], None], ...] = (
    arrives_as_sent,
    both_directions_are_independent,
    order_is_kept_between_messages_and_chunks,
    window_bounds_each_run_and_edge,
    limit_bounds_the_link,
    release_counts_once,
    releases_may_come_in_any_order,
    falsy_payloads_are_payloads,
    many_tensors_of_many_kinds,
    the_producer_may_reuse_its_buffer,
    long_messages_arrive_whole,
    a_burst_of_messages_is_not_lost,
    a_full_pipe_says_not_now_and_recovers,
    a_full_slab_says_not_now_and_recovers,
    larger_than_the_slab_takes_another_way,
    what_arrived_before_the_close_is_delivered,
    sending_to_a_closed_peer_still_delivers_what_it_sent,
    closing_leaves_nothing_behind,
    a_bad_chunk_hurts_only_itself,
)


def check_name(check: Callable[[Carrier], None]) -> str:
    return check.__name__


@contextlib.contextmanager
def closing(a: Connector, b: Connector) -> Iterator[tuple[Any, Any]]:
    """Two ends, closed at the end; a connector may be closed twice."""
    try:
        yield a, b
    finally:
        a.close()
        b.close()
