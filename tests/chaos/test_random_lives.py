# SPDX-License-Identifier: Apache-2.0
"""Random lives against the real server: what they leave, and that each saw exactly one end of its own.

`make test` lives some, `make chaos` more and kills stubs as well, `make test-soak` ten thousand in one server. Every
batch prints its seed, its ends and what the processes grew.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.fuzzed_requests import Tally, live, random_plan, report
from tests.kit.load_generator import Plan, body, run_many
from tests.kit.metrics_reconcile import disagreements
from tests.kit.server_calls import holdings, memory_kb, metrics, wait_until_back, wait_until_idle
from tests.kit.triton_server import RunningServer, running_server, toy_repository
from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.supervisor.serve.processes import wait_until

pytestmark = [pytest.mark.triton]
STREAMS = 48  # more than fit: some wait for admission, some are refused
DEPLOY = "pipeline: toy\norchestrator: {max_live: 24, max_queue: 16}\nstages: {tokens: {}, frames: {}, wave: {}}\n"
BACK_S = 90.0
SLACK = {"tritonserver fds": 6}  # its gRPC keeps a few more or fewer, however many requests there were


@contextmanager
def small_toy(folder: Path, supervised: bool = False) -> Iterator[RunningServer]:
    """A toy server with little room."""
    options = ["--silent-s", "8", "--stage-silent-s", "8"] if supervised else ()
    with running_server([toy_repository(folder, DEPLOY)], supervised=supervised, serve_options=options) as server:
        yield server


def warm(server: RunningServer) -> dict[str, int]:
    """Make links, queues and slabs that stay from then on; returns what the server holds with them."""
    wait_until_back(server, BACK_S)
    for count, nbytes in ((1, 9 << 20), (STREAMS, 1 << 20)):
        large = {stage: {"frame_bytes": nbytes} for stage in ("tokens", "frames")}
        run_many(server.grpc, [Plan(body(20, **large))] * count, count)
    wait_until_idle(server, timeout_s=BACK_S)
    return holdings(server)


def batch(server: RunningServer, held: dict[str, int], seed: int, count: int, deaths: float = 0.0) -> Tally:
    """Live `count` lives; judge them and what the server holds afterwards, against what it `held` at first."""
    rng = random.Random(seed)
    counted, started = metrics(server), time.monotonic()
    tally = live(server.grpc, [random_plan(rng, deaths=deaths) for _ in range(count)], STREAMS)
    seconds = time.monotonic() - started
    wait_until_back(server, BACK_S)
    wait_until_idle(server, timeout_s=BACK_S)
    print(f"seed {seed}, load {os.getloadavg()[0]:.0f}, {seconds:.0f} s: {report(tally)}")
    assert tally.faults == []
    assert wait_until(lambda: grown(server, held) == {}, 20), grown(server, held)
    assert disagreements(counted, metrics(server), tally.seen) == []
    return tally


def grown(server: RunningServer, before: dict[str, int]) -> dict[str, int]:
    """What is held more of than before. A worker that died and came back holds fewer links until it needs them."""
    try:
        after = holdings(server)
    except (OSError, PeerLost) as error:
        return {f"not known: {error}": 1}
    return {name: after.get(name, 0) - n for name, n in before.items() if after.get(name, 0) > n + SLACK.get(name, 0)}


@pytest.mark.timeout(240)
def test_random_lives(tmp_path: Path) -> None:
    with small_toy(tmp_path) as server:
        held = warm(server)
        batch(server, held, 1, 400)
        batch(server, held, 2, 200, deaths=0.01)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_more_random_lives(tmp_path: Path) -> None:
    with small_toy(tmp_path) as server:
        held = warm(server)
        for seed in range(10, 20):
            batch(server, held, seed, 300, deaths=0.01 * (seed % 2))


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "model"), [(30, "toy_tokens"), (31, "toy_frames"), (32, "toy_wave"), (33, "toy"), (34, "toy")]
)
def test_a_stub_dies_under_random_lives(tmp_path: Path, seed: int, model: str) -> None:
    with small_toy(tmp_path, supervised=True) as server:
        rng = random.Random(seed)
        warm(server)
        plans = [plan for plan in (random_plan(rng) for _ in range(200)) if plan.model == "toy"]
        plans[len(plans) // 2].before = killer(server, model)
        tally = live(server.grpc, plans, STREAMS)
        print(f"seed {seed}, {model} killed: {report(tally)}")
        assert tally.faults == []
        batch(server, warm(server), seed + 100, 100)


def killer(server: RunningServer, model: str) -> Callable[[], None]:
    """Kills a model's stub."""
    return lambda: os.kill(server.instance(model).pid, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_random_lives(tmp_path: Path) -> None:
    """In one server; resident memory may grow by 1 MB per 1,000 requests after the first 2,000."""
    sizes: list[dict[str, int]] = []
    with small_toy(tmp_path) as server:
        held = warm(server)
        for seed in range(200, 220):
            batch(server, held, seed, 500)
            sizes.append(memory_kb(server))
            print(f"resident KiB: {sizes[-1]}", flush=True)
        for seed in range(220, 224):
            batch(server, held, seed, 100, deaths=0.02)
    first, last = sizes[3], sizes[-1]
    slopes = {role: (last[role] - first[role]) / 1024 / 8 for role in first}
    print(f"MB per 1,000 requests after warm-up: { {role: round(mb, 2) for role, mb in slopes.items()} }")
    assert {role: mb for role, mb in slopes.items() if mb > 1} == {}
