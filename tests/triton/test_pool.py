# SPDX-License-Identifier: Apache-2.0
"""Stages with two workers on a real server: deaths cost no request that had no output."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.kit.load_generator import Plan, run_many, run_one
from tests.kit.pool_kills import load_under_kills, plan, pool_repository
from tests.kit.server_calls import health, wait_until_idle
from tests.kit.triton_server import RunningServer, running_server, wait_for

pytestmark = [pytest.mark.triton, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server([pool_repository(tmp_path_factory.mktemp("pool"))]) as server:
        yield server


def test_no_request_without_output_fails_while_workers_are_killed(pool: RunningServer) -> None:
    fates, kills = load_under_kills(pool, requests=120, seed=1)
    print(f"{kills} kills: {fates}")
    assert kills >= 3
    assert fates["completed"] >= 60
    wait_until_idle(pool)


def test_requests_wait_while_both_workers_are_down(pool: RunningServer) -> None:
    pids = health(pool)["stages"]["wave"]["worker_pids"]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: health(pool)["stages"]["wave"]["ready"] == 0, 5, "both deaths are noticed")
    assert health(pool)["state"] == "degraded", "text can still be made"
    lives = run_many(pool.grpc, [plan(3)] * 4, 4)
    assert [life.ends for life in lives] == [["length"]] * 4
    wait_until_idle(pool)


def test_a_request_may_wait_no_longer_than_its_queue_deadline(pool: RunningServer) -> None:
    for pid in health(pool)["stages"]["wave"]["worker_pids"]:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: health(pool)["stages"]["wave"]["ready"] == 0, 5, "both are seen to be stopped")
        body = plan(3).body
        assert isinstance(body, dict)
        life = run_one(pool.grpc, Plan({**body, "deadlines": {"queue_s": 0.5}}, timeout_s=30))
        assert len(life.ends) == 1 and "unavailable:wave" in life.ends[0], life.ends
    finally:
        for pid in health(pool)["stages"]["wave"]["worker_pids"]:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: health(pool)["state"] == "ready", 60, "both are back")
    wait_until_idle(pool)
