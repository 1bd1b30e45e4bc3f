# SPDX-License-Identifier: Apache-2.0
"""Opening beside an engine in a long step: only runs of that stage wait, and all join at its end."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.kit.load_generator import Life, Plan, body, run_many, run_one
from tests.kit.server_calls import health, wait_until_idle
from tests.kit.triton_server import RunningServer, wait_for
from triton_omni.backends.control import probe

pytestmark = pytest.mark.triton
COUNT, TOKENS = 8, 3


def test_opens_of_one_long_step_join_together_and_hold_up_no_other_stage(toy: RunningServer) -> None:
    """The step is as long as we keep the worker stopped; the engine's own count of steps says who joined when."""
    wait_until_idle(toy, timeout_s=10)
    run_one(toy.grpc, Plan(body(1)))  # links exist
    tokens = toy.instance("toy_tokens")
    before = probe(tokens.address, 5).numbers
    lives: list[Life] = []
    clients = threading.Thread(
        target=lambda: lives.extend(run_many(toy.grpc, [Plan(body(TOKENS, ("text",)))] * COUNT, COUNT))
    )
    os.kill(tokens.worker_pid, signal.SIGSTOP)
    try:
        clients.start()
        wait_for(lambda: health(toy)["stages"]["tokens"]["live"] == COUNT, 20, "all of them are to be opened")
        speech = run_one(toy.grpc, Plan({"operation": "speech", "input": "three short words"}, timeout_s=20))
        assert speech.ends == ["stop"], "its opens came behind theirs and did not wait"
    finally:
        os.kill(tokens.worker_pid, signal.SIGCONT)
    clients.join(30)
    assert [life.ends for life in lives] == [["length"]] * COUNT
    after = probe(tokens.address, 5).numbers
    assert after["steps"] - before["steps"] == TOKENS, "every step was everybody's"
