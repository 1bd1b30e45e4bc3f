# SPDX-License-Identifier: Apache-2.0
"""Workers die in mid-stream: their requests get one clear error, others go on, and the worker comes back."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

import pytest

from tests.kit.budgets import DEATH_SEEN_S, RECOVERED_S
from tests.kit.load_generator import Life, Plan, body, run_many, run_one
from tests.kit.server_calls import health, restarts, wait_until_back, wait_until_idle, wait_until_restarted
from tests.kit.triton_server import RunningServer, wait_for
from triton_omni.backends.config.schema import OrchestratorDeploy
from triton_omni.backends.control import probe

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("victim", ["tokens", "frames", "wave"])
def test_killed_worker(toy: RunningServer, victim: str) -> None:
    wait_until_back(toy, RECOVERED_S)
    needs = {"tokens": ("text", "audio"), "frames": ("audio",), "wave": ("audio",)}[victim]
    behaviour = {m: {"hold_after": 3} if m in needs else {"delay_s": 0.05} for m in ("text", "audio")}
    plans = [Plan(body(60, (m,), tokens=behaviour[m]), timeout_s=60) for m in ("text", "audio") * 6]
    lives: list[Life] = []
    clients = threading.Thread(target=lambda: lives.extend(run_many(toy.grpc, plans, 12)))
    clients.start()
    address = toy.instance(f"toy_{victim}").address
    wait_for(lambda: probe(address, 5).live == 6 * len(needs), 20, "the victim has accepted them all")
    os.kill(health(toy)["stages"][victim]["worker_pids"][0], signal.SIGKILL)
    wait_for(lambda: not health(toy)["ready"], DEATH_SEEN_S, "health tells the truth")
    wait_for(lambda: health(toy)["live"] <= 12 - 6 * len(needs), DEATH_SEEN_S, "requests that need it have failed")
    clients.join(60)
    ends = Counter((plan.body["modalities"][0], life.ends[0]) for plan, life in zip(plans, lives, strict=True))
    died = f"error [stage_failed:{victim}] the stage's worker died"
    expected = {(m, died if m in needs else "length"): 6 for m in ("text", "audio")}
    assert ends == expected
    assert all(len(life.ends) == 1 for life in lives)
    wait_until_back(toy, RECOVERED_S)
    assert run_one(toy.grpc, Plan(body(5))).ends == ["length"]
    wait_until_idle(toy)
    serves_its_live_limit(toy)


def serves_its_live_limit(toy: RunningServer) -> None:
    """As many requests as may run at once do run at once, and all of them complete."""
    limit = OrchestratorDeploy().max_live
    plan = Plan(body(3, ("text",), tokens={"together": limit}), timeout_s=RECOVERED_S)
    assert [life.ends for life in run_many(toy.grpc, [plan] * limit, limit)] == [["length"]] * limit


def test_a_stopped_worker_is_not_ready_and_comes_back(toy: RunningServer) -> None:
    """It was `ready` until hang_s, and every request waited for it."""
    wait_for(lambda: health(toy)["ready"], 60, "ready")
    stopped = toy.instance("toy_wave").worker_pid
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: health(toy)["stages"]["wave"]["state"] == "stuck", 5, "health tells the truth")
    refused = run_one(toy.grpc, Plan(body(3), timeout_s=20)).ends
    assert refused == ["error [unavailable:wave] the stage's worker is stopped"]
    assert run_one(toy.grpc, Plan(body(3, ("text",)))).ends == ["length"], "text goes on"
    wait_for(lambda: health(toy)["ready"] and toy.instance("toy_wave").worker_pid != stopped, 60, "a new worker")
    assert run_one(toy.grpc, Plan(body(3))).ends == ["length"]


def test_worker_that_kills_itself_and_one_that_raises(toy: RunningServer) -> None:
    for misdeed in ("die_after", "raise_after"):
        for stage in ("tokens", "wave"):
            before = restarts(toy, stage)
            life = run_one(toy.grpc, Plan(body(10, ("audio",), **{stage: {misdeed: 3}}), timeout_s=20))
            assert len(life.ends) == 1
            assert f"[stage_failed:{stage}]" in life.ends[0], life.ends
            wait_until_restarted(toy, stage, before)
    wait_until_idle(toy)


def test_while_a_stage_restarts_requests_are_refused_at_once(toy: RunningServer) -> None:
    wait_until_back(toy, RECOVERED_S)
    os.kill(health(toy)["stages"]["wave"]["worker_pids"][0], signal.SIGKILL)
    wait_for(lambda: not health(toy)["ready"], DEATH_SEEN_S, "seen")
    life = run_one(toy.grpc, Plan(body(5, ("audio",)), timeout_s=20))
    assert len(life.ends) == 1
    assert life.ends[0] == "stop" or "unavailable:wave" in life.ends[0], life.ends
    assert run_one(toy.grpc, Plan(body(5, ("text",)), timeout_s=20)).ends == ["length"]  # text goes on
    wait_until_back(toy, RECOVERED_S)
