# SPDX-License-Identifier: Apache-2.0
"""Workers die in mid-stream: their requests get one clear error, others go on, and the worker comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

import pytest

from tests.kit.load_generator import Life, Plan, body, run_many, run_one
from tests.kit.server_calls import health, idle
from tests.kit.triton_server import RunningServer, wait_for
from triton_omni.backends.config.schema import OrchestratorDeploy
from triton_omni.backends.control import probe

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("victim", ["tokens", "frames", "wave"])
def test_killed_worker(toy: RunningServer, victim: str) -> None:
    wait_for(lambda: health(toy)["ready"], 60, "ready")
    needs = {"tokens": ("text", "audio"), "frames": ("audio",), "wave": ("audio",)}[victim]
    slow = {"delay_s": 0.05}
    plans = [Plan(body(60, (m,), tokens=slow), timeout_s=60) for m in ("text", "audio") * 6]
    lives: list[Life] = []
    clients = threading.Thread(target=lambda: lives.extend(run_many(toy.grpc, plans, 12)))
    clients.start()
    address = toy.instance(f"toy_{victim}").address
    wait_for(lambda: probe(address, 5).live == 6 * len(needs), 20, "the victim has accepted them all")
    killed_s = time.monotonic()
    os.kill(health(toy)["stages"][victim]["worker_pids"][0], signal.SIGKILL)
    wait_for(lambda: not health(toy)["ready"], 2.0, "health tells the truth")
    left_s = 2.0 - (time.monotonic() - killed_s)
    wait_for(lambda: health(toy)["live"] <= 12 - 6 * len(needs), left_s, "who needs it has failed, others may go on")
    clients.join(60)
    ends = Counter((plan.body["modalities"][0], life.ends[0]) for plan, life in zip(plans, lives, strict=True))
    died = f"error [stage_failed:{victim}] the stage's worker died"
    expected = {(m, died if m in needs else "length"): 6 for m in ("text", "audio")}
    assert ends == expected
    assert all(len(life.ends) == 1 for life in lives)
    wait_for(lambda: health(toy)["ready"], 30, "the worker is back by itself")
    assert run_one(toy.grpc, Plan(body(5))).ends == ["length"]
    wait_for(lambda: idle(toy), 2.0, "every slot free")
    serves_its_live_limit(toy)
    assert time.monotonic() - killed_s < 60


def serves_its_live_limit(toy: RunningServer) -> None:
    """As many requests as may be in work are in work at the same time, and all of them end well."""
    limit = OrchestratorDeploy().max_live
    plan, lives = Plan(body(40, ("text",), tokens={"delay_s": 0.15}), timeout_s=60), list[Life]()
    clients = threading.Thread(target=lambda: lives.extend(run_many(toy.grpc, [plan] * limit, limit)))
    clients.start()
    address = toy.instance("toy_tokens").address
    wait_for(lambda: probe(address, 5).live == limit, 20, "all of them are in work")
    clients.join(60)
    assert [life.ends for life in lives] == [["length"]] * limit


def test_worker_that_kills_itself_and_one_that_raises(toy: RunningServer) -> None:
    def restarts(stage: str) -> int:
        return health(toy)["stages"][stage]["restarts"]

    for misdeed in ("die_after", "raise_after"):
        for stage in ("tokens", "wave"):
            before = restarts(stage)
            life = run_one(toy.grpc, Plan(body(10, ("audio",), **{stage: {misdeed: 3}}), timeout_s=20))
            assert len(life.ends) == 1
            assert f"[stage_failed:{stage}]" in life.ends[0], life.ends
            # "ready" alone may still be the dead worker's: the stub hears of a death a moment after its clients
            wait_for(lambda s=stage, n=before: restarts(s) > n and health(toy)["ready"], 30, "the worker is back")
    wait_for(lambda: health(toy)["ready"] and idle(toy), 30, "ready and idle again")


def test_while_a_stage_restarts_requests_are_refused_at_once(toy: RunningServer) -> None:
    wait_for(lambda: health(toy)["ready"], 30, "ready")
    os.kill(health(toy)["stages"]["wave"]["worker_pids"][0], signal.SIGKILL)
    wait_for(lambda: not health(toy)["ready"], 2.0, "seen")
    life = run_one(toy.grpc, Plan(body(5, ("audio",)), timeout_s=20))
    assert len(life.ends) == 1
    assert life.ends[0] == "stop" or "unavailable:wave" in life.ends[0], life.ends
    assert run_one(toy.grpc, Plan(body(5, ("text",)), timeout_s=20)).ends == ["length"]  # text goes on
    wait_for(lambda: health(toy)["ready"], 30, "ready again")
