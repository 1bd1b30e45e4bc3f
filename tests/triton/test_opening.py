# SPDX-License-Identifier: Apache-2.0
"""Opening beside an engine in a long step: only runs of that stage wait, and all join at its end."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.kit.load_generator import Life, Plan, body, run_many, run_one
from tests.kit.server_calls import generate, health, wait_until_idle
from tests.kit.triton_server import RunningServer, wait_for
from triton_omni.backends.control import probe

pytestmark = pytest.mark.triton
COUNT, TOKENS = 8, 3


def pieces_sent(server: RunningServer) -> int:
    """Pieces of text that unfinished requests have sent."""
    _, answer = generate(server, request=json.dumps({"operation": "requests"}), operator_key=server.operator_key)
    return sum(request["pieces"].get("text", 0) for request in answer["event"]["status"].get("requests", []))


def opens_during_a_step(toy: RunningServer, step_s: float) -> bool:
    """Open runs while the second step of another takes `step_s`. False if the step ended before that was done."""
    tokens = toy.instance("toy_tokens")
    before = probe(tokens.address, 5).numbers
    lives: list[Life] = []
    holder = threading.Thread(
        target=run_one, args=(toy.grpc, Plan(body(2, ("text",), tokens={"hang_after": 1, "hang_s": step_s})))
    )
    clients = threading.Thread(
        target=lambda: lives.extend(run_many(toy.grpc, [Plan(body(TOKENS, ("text",)))] * COUNT, COUNT))
    )
    start_s = time.monotonic()
    holder.start()
    wait_for(lambda: pieces_sent(toy) == 1, 20, "the first step is done")
    clients.start()
    wait_for(lambda: health(toy)["stages"]["tokens"]["live"] == COUNT + 1, 20, "all of them are to be opened")
    speech = run_one(toy.grpc, Plan({"operation": "speech", "input": "three short words"}, timeout_s=60))
    in_time = time.monotonic() - start_s < step_s
    holder.join(step_s + 30)
    clients.join(30)
    assert speech.ends == ["stop"]
    assert [life.ends for life in lives] == [["length"]] * COUNT
    if in_time:  # the speech's opens came behind theirs and did not wait
        after = probe(tokens.address, 5).numbers
        assert after["steps"] - before["steps"] == 2 + TOKENS, "every step after the long one was everybody's"
    return in_time


def test_opens_of_one_long_step_join_together_and_hold_up_no_other_stage(toy: RunningServer) -> None:
    """The step is made longer until all opens fit into it; the engine's own count of steps says who joined when."""
    wait_until_idle(toy, timeout_s=10)
    run_one(toy.grpc, Plan(body(1)))  # links exist
    assert any(opens_during_a_step(toy, step_s) for step_s in (3.0, 10.0, 25.0)), "the speech waited for the step"
