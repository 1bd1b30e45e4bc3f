# SPDX-License-Identifier: Apache-2.0
"""Stubs that live and do nothing, and an orchestrator whose opening never returns: seen, and put right."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.kit.budgets import DEATH_SEEN_S
from tests.kit.load_generator import Life, Plan, body, run_one
from tests.kit.server_calls import generate, health, is_back, wait_until_back, wait_until_idle
from tests.kit.triton_server import TOY_REPOSITORY, RunningServer, running_server, wait_for

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]
BACK_S = 90.0


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server([TOY_REPOSITORY], supervised=True, serve_options=["--silent-s", "8"]) as running:
        yield running
    assert running.processes() == []


def stage_state(server: RunningServer, stage: str) -> str:
    return health(server)["stages"][stage]["state"]


def test_a_stub_killed_while_a_run_is_being_opened(server: RunningServer) -> None:
    """BLS then waits forever. The orchestrator reports it, ends the requests that wait, and is loaded again.

    The stub comes to no acknowledgement because the orchestrator's socket is out of its sight; so this test goes first,
    before there are links.
    """
    wait_until_back(server, BACK_S)
    stub, orchestrator = server.instance("toy_wave"), server.instance("toy")
    hidden = f"{orchestrator.address}.hidden"
    plan = Plan(body(3, ("audio",)), timeout_s=90)
    lives: list[Life] = []
    client = threading.Thread(target=lambda: lives.append(run_one(server.grpc, plan)))
    os.rename(orchestrator.address, hidden)
    client.start()
    wait_for(lambda: "its orchestrator is gone" in server.log.read_text(errors="replace"), 30, "the stub has the run")
    status, _ = generate(server, "toy_wave", text_input="no such call")
    assert status == 400, "its execute has returned: else Triton answers for the dead stub, and nothing is stuck"
    os.rename(hidden, orchestrator.address)
    os.kill(stub.pid, signal.SIGKILL)
    wait_for(lambda: server.instance("toy").state == "stuck", 30, "the opening is seen not to return")
    client.join(90)
    assert [life.ends for life in lives] == [["error [unavailable:wave] Triton is not accepting new BLS requests"]]
    wait_for(lambda: is_back(server) and server.instance("toy").pid != orchestrator.pid, BACK_S, "a new orchestrator")
    assert run_one(server.grpc, Plan(body(3))).ends == ["length"]
    wait_until_idle(server)


def test_a_stopped_stage_stub_is_seen_and_replaced(server: RunningServer) -> None:
    wait_until_back(server, BACK_S)
    stub = server.instance("toy_wave")
    os.kill(stub.pid, signal.SIGSTOP)
    wait_for(lambda: stage_state(server, "wave") == "stuck", DEATH_SEEN_S, "health tells the truth")
    assert not health(server)["ready"]
    assert run_one(server.grpc, Plan(body(3, ("text",)))).ends == ["length"], "text is unaffected"
    refused = run_one(server.grpc, Plan(body(3), timeout_s=20)).ends
    assert len(refused) == 1 and refused[0].startswith("error [unavailable:wave]"), refused
    wait_for(lambda: server.health() == "degraded", 10, "the supervisor says so")
    wait_for(lambda: is_back(server) and server.instance("toy_wave").pid != stub.pid, BACK_S, "a new stub")
    assert run_one(server.grpc, Plan(body(3))).ends == ["length"]


def test_a_stub_that_goes_on_is_well_again(server: RunningServer) -> None:
    wait_until_back(server, BACK_S)
    stub = server.instance("toy_wave")
    os.kill(stub.pid, signal.SIGSTOP)
    wait_for(lambda: stage_state(server, "wave") == "stuck", DEATH_SEEN_S, "seen")
    os.kill(stub.pid, signal.SIGCONT)
    wait_until_back(server, 10)
    assert server.instance("toy_wave").pid == stub.pid
    # Triton asks stubs for their health at intervals of its own, and refuses calls until it has asked again
    wait_for(lambda: run_one(server.grpc, Plan(body(3))).ends == ["length"], 10, "an answer of the same stub")
