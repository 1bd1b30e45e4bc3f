# SPDX-License-Identifier: Apache-2.0
"""Workers that a placer starts: with a placer that starts them on this host, or does something else."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.kit.budgets import within
from tests.kit.tcp_ends import KEY
from tests.kit.toy_hosts import toy_hosts
from triton_omni.backends.control.link_settings import LinkSettings
from triton_omni.backends.core.errors import OmniError, Unavailable
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling
from triton_omni.backends.scale.placer import why_pending
from triton_omni.backends.stub import placed_worker

ROOT = Path(__file__).resolve().parents[3]
LINKS = LinkSettings("127.0.0.1", KEY)


def placer(mode=""):
    return [sys.executable, str(ROOT / "tests" / "kit" / "fake_placer.py"), mode]


def chat(count, /, **stages):
    return GenerateRequest(
        messages=(Message("user", "a b c"),), modalities=("text", "audio"), sampling=Sampling(max_tokens=count),
        stages=stages,
    )  # fmt: skip


def until(true, what):
    deadline = time.monotonic() + within(20)
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def test_a_placed_worker_joins_serves_and_is_placed_again_when_it_dies(tmp_path):
    with toy_hosts(tmp_path, LINKS, ["frames"], placer=placer()) as hosts:
        hosts.wait_ready("frames")
        stub = hosts.stubs["frames"]
        until(lambda: stub.worker.placement == "on node nnnnnnnn at here", "its placement is known")
        assert not isinstance(hosts.call(chat(10)).outcome(), OmniError)
        held = hosts.call(chat(100, frames={"die_after": 3}))
        assert isinstance(held.outcome(), OmniError)
        until(lambda: stub.worker.restarts == 1 and stub.ready.is_set(), "another one is placed")
        assert not isinstance(hosts.call(chat(10)).outcome(), OmniError)


def test_a_demand_that_no_node_meets_is_named_and_asked_for_again(tmp_path):
    with toy_hosts(tmp_path, LINKS, ["wave"], placer=placer("pending"), demand={"wait_s": 0.5}) as hosts:
        worker = hosts.stubs["wave"].worker
        until(lambda: worker.placement == "needs 3 GPU", "the reason")
        refused = hosts.call(chat(3)).outcome()
        assert isinstance(refused, Unavailable) and "waits for a worker to join" in str(refused)
        until(lambda: worker._starts > 2, "it is asked for again after wait_s")


def test_a_worker_that_ends_before_it_joins_is_placed_again_later_each_time(tmp_path):
    with toy_hosts(tmp_path, LINKS, ["wave"], placer=placer("dead")) as hosts:
        worker = hosts.stubs["wave"].worker
        until(lambda: worker.restarts >= 3, "it is placed again")
        assert worker._backoff.deaths >= 3


def test_a_placer_that_dies_is_started_again_and_placed_workers_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(placed_worker, "RESTART_PAUSE_S", 0.2)
    with toy_hosts(tmp_path, LINKS, ["wave"], placer=placer()) as hosts:
        hosts.wait_ready("wave")
        stub = hosts.stubs["wave"]
        first = stub.worker._placer._process
        first.kill()
        until(lambda: stub.worker._placer._process is None, "its end is noticed")
        assert not isinstance(hosts.call(chat(5)).outcome(), OmniError), "the placed worker goes on"
        assert isinstance(hosts.call(chat(20, wave={"die_after": 1})).outcome(), OmniError)
        until(lambda: stub.worker._placer._process is not None, "a new placer")
        until(lambda: stub.worker.restarts and stub.loop.state == "ready", "it places the next worker")
        assert not isinstance(hosts.call(chat(5)).outcome(), OmniError)


def test_orders_of_a_placer_that_died_are_given_again(tmp_path, monkeypatch):
    monkeypatch.setattr(placed_worker, "RESTART_PAUSE_S", 0.2)
    with toy_hosts(tmp_path, LINKS, ["wave"], placer=placer("deaf")) as hosts:
        worker = hosts.stubs["wave"].worker
        until(lambda: worker._placer._process is not None, "it is started")
        worker._placer._command = placer()
        worker._placer._process.kill()
        hosts.wait_ready("wave")  # long before wait_s


def test_a_placer_that_cannot_be_started_is_no_end_of_the_stub(tmp_path, monkeypatch):
    monkeypatch.setattr(placed_worker, "RESTART_PAUSE_S", 0.1)
    with toy_hosts(tmp_path, LINKS, ["wave"], placer=["/no/such/python"]) as hosts:
        worker = hosts.stubs["wave"].worker
        until(lambda: worker._starts > 2, "tried again")
        assert worker.placement == "there is no placer now"
        text = GenerateRequest(messages=(Message("user", "a"),), modalities=("text",), sampling=Sampling(max_tokens=3))
        assert not isinstance(hosts.call(text).outcome(), OmniError), "stages without it go on"


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ({"cpus": 1, "gpus": 3, "resources": {}}, "needs 1 CPU, 3 GPU; none of the 2 node(s) of the cluster has that"),
        ({"cpus": 0, "gpus": 1, "resources": {}}, "needs 1 GPU; the 1 node(s) that have it are in use"),
        ({"cpus": 0, "gpus": 0, "resources": {"x": 0.5}}, "needs 0.5 x; none of the 2 node(s) of the cluster has that"),
    ],
)  # fmt: skip
def test_why_a_worker_is_not_placed(order, why):
    nodes = [
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}},
        {"Alive": False, "Resources": {"CPU": 4.0, "GPU": 8.0, "x": 1.0}},
    ]
    assert why_pending(nodes, order) == why
