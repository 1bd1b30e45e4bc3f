# SPDX-License-Identifier: Apache-2.0
"""One bare link between two processes: one-way latency when paced, chunks/s and GB/s when saturated; pyzmq beside it.

    python -m perf.connector [--rounds 5] [--burners 0] [--sizes 4096,65536]     paced latency, carriers alternating

`--burners` starts as many processes that use a core each: a loaded machine that is the same for all carriers.

The consumer reads one byte of each page in place. A hop of ours copies the payload once, into the link's slab (up to
INLINE_BYTES it is copied through the socket instead); pyzmq copies it into and out of the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from perf.measures import percentile
from triton_omni.backends.control.hub import Hub, Lost
from triton_omni.backends.control.link_settings import LinkSettings
from triton_omni.backends.core.chunk import Chunk, Tensor

SIZES = {4096: 20_000, 65_536: 10_000, 1 << 20: 2_000, 16 << 20: 150}
PACED = {4096: 500, 65_536: 500, 1 << 20: 200, 16 << 20: 40}
PACE_S = {4096: 0.002, 65_536: 0.002, 1 << 20: 0.004, 16 << 20: 0.03}
WARM_UP = 5  # first chunks pay for the slab
RUNS = 16  # streams that share the link when it is saturated
PAGE_BYTES = 4096
TIMEOUT_S = 120.0
TCP = LinkSettings("127.0.0.1", bytes(32))

Numbers = tuple[list[float], float]
"""One-way times in microseconds, and seconds from the first chunk to the last."""


def touch(data: Any) -> int:
    return int(np.frombuffer(memoryview(data), np.uint8)[::PAGE_BYTES].sum())


def stamp(data: np.ndarray) -> None:
    """Write the time into the first bytes: a TCP link carries no time of another host."""
    data[:8] = np.frombuffer(struct.pack("<d", time.monotonic()), np.uint8)


def age_us(data: Any, now: float) -> float:
    return 1e6 * (now - struct.unpack_from("<d", memoryview(data))[0])


def link_consumer(address: str, count: int, say: Connection) -> None:
    take_chunks(Hub("consumer", Path(address)), count, say)


def tcp_consumer(address: str, count: int, say: Connection) -> None:
    take_chunks(Hub("consumer", links=TCP, joinable=True), count, say)


def take_chunks(hub: Hub, count: int, say: Connection) -> None:
    """Take `count` chunks, acknowledging all of a turn together as a worker does."""
    lat_us: list[float] = []
    started = 0.0
    say.send(hub.address)
    while len(lat_us) < count:
        items = hub.poll(TIMEOUT_S)
        with hub.joined():
            for peer, item in items:
                if isinstance(item, Chunk) and peer is not None:
                    now = time.monotonic()
                    started = started or now
                    lat_us.append(age_us(item.tensors[0].data, now))
                    touch(item.tensors[0].data)
                    peer.release(item)
    say.send((lat_us, time.monotonic() - started))
    hub.poll(TIMEOUT_S)  # until the producer has closed, so that the last acknowledgements are read
    hub.close()


def link_producer(address: str, size: int, count: int, pace_s: float) -> None:
    hub = Hub("producer", links=TCP)
    peer = hub.connect(address)
    runs, data = [os.urandom(16) for _ in range(RUNS)], np.random.randint(0, 255, size, np.uint8)
    sent, index = 0, [0] * RUNS
    while sent < count:
        with hub.joined():
            progress = False
            for i, run in enumerate(runs if not pace_s else runs[:1]):
                if pace_s:
                    stamp(data)
                chunk = Chunk(run, "e", index[i], tensors=(Tensor.of("x", data),))
                if sent < count and peer.put(chunk):
                    sent, progress = sent + 1, True
                    index[i] += 1
        for _, item in hub.poll(0 if progress else TIMEOUT_S):
            assert not isinstance(item, Lost)
        if pace_s:
            time.sleep(pace_s)
    while peer.connector.in_flight:
        hub.poll(TIMEOUT_S)
    hub.close()


def zmq_consumer(address: str, count: int, say: Connection) -> None:
    import zmq

    socket, lat_us, started = zmq.Context().socket(zmq.PULL), [], 0.0
    socket.setsockopt(zmq.RCVHWM, 64)
    socket.bind(f"ipc://{address}")
    say.send(address)
    while len(lat_us) < count:
        at, data = socket.recv_multipart(copy=False)
        now = time.monotonic()
        started = started or now
        lat_us.append(1e6 * (now - float(at.bytes)))
        touch(data.buffer)
    say.send((lat_us, time.monotonic() - started))


def zmq_producer(address: str, size: int, count: int, pace_s: float) -> None:
    import zmq

    context = zmq.Context()
    socket, data = context.socket(zmq.PUSH), np.random.randint(0, 255, size, np.uint8)
    socket.setsockopt(zmq.SNDHWM, 64)
    socket.connect(f"ipc://{address}")
    for _ in range(count):
        socket.send_multipart([repr(time.monotonic()).encode(), data.data], copy=size <= PAGE_BYTES)
        if pace_s:
            time.sleep(pace_s)
    socket.close(linger=int(1e3 * TIMEOUT_S))
    context.term()


CARRIERS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "shm link": (link_consumer, link_producer),
    "tcp link": (tcp_consumer, link_producer),
    "pyzmq ipc": (zmq_consumer, zmq_producer),
}


def passage(carrier: str, size: int, count: int, pace_s: float) -> Numbers:
    """`count` chunks from this process to a fresh one."""
    consume, produce = CARRIERS[carrier]
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(prefix="omni-perf-") as folder:
        address = str(Path(folder) / "s")
        child = multiprocessing.get_context("spawn").Process(target=consume, args=(address, count, theirs))
        child.start()
        try:
            produce(ours.recv(), size, count, pace_s)
            assert ours.poll(TIMEOUT_S), f"{carrier}: the consumer did not get everything"
            return ours.recv()
        finally:
            child.join(TIMEOUT_S)


def table() -> None:
    """Print the table."""
    print("| payload | carrier | one way p50 / p99 us | chunks/s | GB/s |\n|---|---|---|---|---|")
    for size, count in SIZES.items():
        for carrier in CARRIERS:
            if carrier == "pyzmq ipc" and not has_zmq():
                continue
            lat_us = passage(carrier, size, PACED[size], PACE_S[size])[0][WARM_UP:]
            _, took_s = passage(carrier, size, count, 0.0)
            print(
                f"| {size // 1024} KiB | {carrier} | {percentile(lat_us, 50):.0f} / {percentile(lat_us, 99):.0f} "
                f"| {count / took_s:.0f} | {count * size / took_s / 1e9:.2f} |",
                flush=True,
            )


def has_zmq() -> bool:
    try:
        import zmq  # noqa: F401
    except ImportError:
        return False
    return True


def burn() -> None:
    while True:
        pass


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    """Processes that use a core each."""
    processes = [multiprocessing.get_context("spawn").Process(target=burn, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def kernel_counts() -> dict[str, int]:
    """Counters of the kernel's TCP that are not zero, by name."""
    names, values = Path("/proc/net/netstat").read_text(encoding="ascii").splitlines()[:2]
    return {n: int(v) for n, v in list(zip(names.split(), values.split(), strict=True))[1:]}


def compare(sizes: list[int], rounds: int, load: int) -> None:
    """Print paced latency of shm and TCP, alternating, and what the kernel counted for TCP."""
    print(f"| payload | carrier | p50 us | p99 us | worst us | load {load} |\n|---|---|---|---|---|---|")
    with burners(load):
        for size in sizes:
            times: dict[str, list[float]] = {"shm link": [], "tcp link": []}
            counted: dict[str, int] = {}
            for _ in range(rounds):
                for carrier, lat_us in times.items():
                    before = kernel_counts()
                    lat_us += passage(carrier, size, PACED[size], PACE_S[size])[0][WARM_UP:]
                    if carrier == "tcp link":
                        for name, value in kernel_counts().items():
                            counted[name] = counted.get(name, 0) + value - before[name]
            for carrier, lat_us in times.items():
                row = [f"{percentile(lat_us, q):.0f}" for q in (50, 99, 100)]
                print(f"| {size // 1024} KiB | {carrier} | {' | '.join(row)} | |", flush=True)
            print("   ", {name: value for name, value in counted.items() if value})


def main() -> None:
    parser = argparse.ArgumentParser(prog="perf.connector")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burners", type=int, default=0)
    parser.add_argument("--sizes", default="4096,65536")
    args = parser.parse_args()
    compare([int(size) for size in args.sizes.split(",")], args.rounds, args.burners)


if __name__ == "__main__":
    main()
