# SPDX-License-Identifier: Apache-2.0
"""Hours of random lives at a low rate: memory and names stay what they are.

TRITON_OMNI_SOAK_S    how long (default 3600)
TRITON_OMNI_SOAK_HZ   lives a second (default 3)
What was measured stands in out/soak.json.
"""

from __future__ import annotations

import json
import os
import queue
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.kit.fuzzed_requests import Tally, random_plan, report
from tests.kit.load_generator import Plan, body, run_many, run_one
from tests.kit.server_calls import holdings, memory_kb, wait_until_idle
from tests.kit.triton_server import TOY_REPOSITORY, RunningServer, running_server
from triton_omni.backends.supervisor.home import REPO

SECONDS = float(os.environ.get("TRITON_OMNI_SOAK_S", "3600"))
RATE_HZ = float(os.environ.get("TRITON_OMNI_SOAK_HZ", "3"))
SAMPLE_S = SECONDS / 60
WARM_UP = 0.2  # of the time: caches fill, allocators find their size
STREAMS = 8
MOST_MB_PER_1000 = 1.0

pytestmark = [pytest.mark.triton, pytest.mark.soak, pytest.mark.timeout(SECONDS + 600)]


class Clients:
    """A few threads that live the plans put into `todo`."""

    def __init__(self, url: str) -> None:
        self.todo: queue.SimpleQueue[Plan | None] = queue.SimpleQueue()
        self.tally = Tally()
        self._url = url
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for _ in self._threads:
            self.todo.put(None)
        for thread in self._threads:
            thread.join(120)

    def _run(self) -> None:
        while (plan := self.todo.get()) is not None:
            life = run_one(self._url, plan)
            with self._lock:
                self.tally.add(plan, life)


def samples(server: RunningServer, clients: Clients) -> list[tuple[int, dict[str, int]]]:
    """Live at the rate until the time is over; (lives so far, resident KiB by process) at equal distances."""
    rng, taken = random.Random(99), []
    started = time.monotonic()
    put = 0
    pace = threading.Event()  # never set: waits between two lives
    while (now := time.monotonic() - started) < SECONDS:
        if now >= len(taken) * SAMPLE_S:
            taken.append((put, memory_kb(server)))
        clients.todo.put(random_plan(rng))
        put += 1
        pace.wait(max(0.0, put / RATE_HZ - (time.monotonic() - started)))
    return taken


def slope_mb(lives: np.ndarray, kib: np.ndarray) -> float:
    """Growth in MB per 1,000 lives: the least-squares line."""
    return float(np.polyfit(lives, kib, 1)[0] * 1000 * 1024 / 1e6)


def test_memory_and_names_stay_what_they_are(tmp_path: Path) -> None:
    with running_server([TOY_REPOSITORY]) as server:
        for count, nbytes in ((1, 9 << 20), (32, 1 << 20)):  # the sizes of the lives: links and slabs exist
            large = {stage: {"frame_bytes": nbytes} for stage in ("tokens", "frames")}
            run_many(server.grpc, [Plan(body(20, **large))] * count, 16)
        wait_until_idle(server, timeout_s=10)
        before = holdings(server)
        clients = Clients(server.grpc)
        try:
            taken = samples(server, clients)
        finally:
            clients.close()
        wait_until_idle(server, timeout_s=30)
        after = holdings(server)
    warm = taken[int(len(taken) * WARM_UP) :]
    lives = np.array([n for n, _ in warm])
    slopes = {role: round(slope_mb(lives, np.array([kb[role] for _, kb in warm])), 3) for role in warm[0][1]}
    # tritonserver itself keeps connections of streams cancelled at an unlucky moment (docs/triton-versions.md)
    grown = {k: (before[k], n) for k, n in after.items() if n > before.get(k, 0) and k != "tritonserver fds"}
    result = {
        "seconds": SECONDS, "lives": clients.tally.lives, "ends": clients.tally.ends,
        "faults": clients.tally.faults, "load": os.getloadavg(), "mb_per_1000_lives": slopes,
        "first_kib": warm[0][1], "last_kib": warm[-1][1], "held_before": before, "held_after": after,
    }  # fmt: skip
    out = REPO / "out" / "soak.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1))
    print(report(clients.tally), slopes, sep="\n")
    assert clients.tally.faults == []
    assert {role: mb for role, mb in slopes.items() if mb >= MOST_MB_PER_1000} == {}
    assert grown == {}
