# SPDX-License-Identifier: Apache-2.0
"""Many streams at once, random cancels, and what is left afterwards."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.kit.load_generator import Life, Plan, body, run_many
from tests.kit.server_calls import holdings, wait_until_idle
from tests.kit.triton_server import TOY_REPOSITORY, RunningServer, running_server, wait_for

pytestmark = pytest.mark.triton
HANGS_S = 60.0


@pytest.mark.timeout(420)
def test_64_streams_of_2000_chunks_keep_order_and_lose_nothing(toy: RunningServer) -> None:
    plans = [Plan(body(2000, ("audio",)), timeout_s=400) for _ in range(64)]
    lives = run_many(toy.grpc, plans, 64)
    assert [life.ends for life in lives] == [["stop"]] * 64
    assert [life.counts["audio"] for life in lives] == [2000] * 64
    assert sum(life.order_errors for life in lives) == 0
    assert {life.samples for life in lives} == {2000 * 2 * 240}


def test_large_payloads_arrive_whole(toy: RunningServer) -> None:
    sizes = (8191, 8193, 1 << 20, 40 << 20)  # inline, slab, slab, a memfd of its own; stages check every chunk
    plans = [Plan(body(5, ("audio",), tokens={"frame_bytes": n}, frames={"frame_bytes": n})) for n in sizes]
    lives = run_many(toy.grpc, plans, 4)
    assert [life.ends for life in lives] == [["stop"]] * 4


@pytest.fixture
def own_toy() -> Iterator[RunningServer]:
    """A server for one test: rarely the 24.10 server crashes over cancelled streams (docs/triton-versions.md), and
    then all tests that share one would fail."""
    with running_server([TOY_REPOSITORY]) as server:
        yield server


def is_as_before(before: dict[str, int], now: dict[str, int]) -> bool:
    """A new server's gRPC settles with a few descriptors more or fewer, however many streams there were."""
    name = "tritonserver fds"
    return now == before | {name: now[name]} and now[name] <= before[name] + 6


def test_200_random_cancels_leave_nothing_behind(own_toy: RunningServer) -> None:
    toy = own_toy
    run_many(toy.grpc, [Plan(body(20)) for _ in range(32)], 16)  # warm: links, queues and slabs exist
    wait_until_idle(toy)
    before = holdings(toy)
    rng = random.Random(7)
    plans = [Plan(body(rng.randint(1, 60))) for _ in range(200)]
    for plan in rng.sample(plans, 160):
        plan.cancel_after = rng.randint(0, 30)
    lives = run_many(toy.grpc, plans, 16)
    assert all(len(life.ends) == 1 for life in lives)
    assert sum(life.order_errors for life in lives) == 0
    ends = Counter(life.ends[0] for life in lives)
    assert ends["cancelled here"] > 100
    wait_until_idle(toy)
    wait_for(lambda: is_as_before(before, holdings(toy)), 5.0, f"as before: {before} now {holdings(toy)}")


def test_clients_that_do_not_read_hold_up_no_other(toy: RunningServer) -> None:
    reached, go_on = threading.Semaphore(0), threading.Event()

    def stand_still() -> None:
        reached.release()
        assert go_on.wait(HANGS_S)

    stalled, lives = [Plan(body(200, ("audio",)), reading=stand_still) for _ in range(4)], list[Life]()
    clients = threading.Thread(target=lambda: lives.extend(run_many(toy.grpc, stalled, 4)))
    clients.start()
    for _ in stalled:
        assert reached.acquire(timeout=HANGS_S), "every stalled client has a response before it"
    others = run_many(toy.grpc, [Plan(body(50, ("audio",)), timeout_s=HANGS_S) for _ in range(12)], 12)
    assert [life.ends for life in others] == [["stop"]] * 12
    assert lives == [], "the others ended while these stood still"
    go_on.set()
    clients.join(HANGS_S)
    assert [(life.ends, life.counts["audio"], life.order_errors) for life in lives] == [(["stop"], 200, 0)] * 4
