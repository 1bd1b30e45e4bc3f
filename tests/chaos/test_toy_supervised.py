# SPDX-License-Identifier: Apache-2.0
"""Kill stubs and the server of the toy pipeline while clients stream: every client gets an end, all comes back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.kit.load_generator import Life, Plan, body, run_many, run_one
from tests.kit.server_calls import is_back, wait_until_back, wait_until_idle
from tests.kit.triton_server import TOY_REPOSITORY, RunningServer, running_server, wait_for
from triton_omni.backends.control import probe

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]
BACK_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server([TOY_REPOSITORY], supervised=True) as running:
        yield running
    assert running.processes() == []
    assert running.regions() == []
    assert not running.run_dir.exists()


def under_load(server: RunningServer, kill: int, at_stage: str) -> list[Life]:
    """Kill a process while twelve clients stream; their lives."""
    behaviour = {m: {"hold_after": 3} if at_stage == "tokens" or m == "audio" else {} for m in ("text", "audio")}
    plans = [Plan(body(80, (m,), tokens=behaviour[m]), timeout_s=60) for m in ("text", "audio") * 6]
    lives: list[Life] = []
    clients = threading.Thread(target=lambda: lives.extend(run_many(server.grpc, plans, 12)))
    clients.start()
    address = server.instance(f"toy_{at_stage}").address
    wait_for(lambda: probe(address, 5).live == (12 if at_stage == "tokens" else 6), 20, "all that need it run")
    os.kill(kill, signal.SIGKILL)
    clients.join(120)
    assert not clients.is_alive()
    return lives


def test_killed_stage_stub_under_load(server: RunningServer) -> None:
    wait_until_back(server, BACK_S)
    victim = server.instance("toy_wave").pid
    lives = under_load(server, victim, "wave")
    assert all(len(life.ends) == 1 for life in lives)
    text = [life.ends[0] for life in lives[::2]]
    audio = [life.ends[0] for life in lives[1::2]]
    assert all("error" in end or "lost" in end for end in audio)
    # a killed stub can take the whole server along (transport.md): then text breaks as well, else it goes on
    if server.health() != "restarting" and all("wave" in end for end in audio):
        assert text == ["length"] * 6
    wait_until_back(server, BACK_S)
    assert run_one(server.grpc, Plan(body(5))).ends == ["length"]
    wait_until_idle(server)


def test_killed_orchestrator_stub_under_load(server: RunningServer) -> None:
    wait_until_back(server, BACK_S)
    pid = server.server_pid()
    lives = under_load(server, server.instance("toy").pid, "tokens")
    assert all(len(life.ends) == 1 and life.ends[0] != "timeout" for life in lives), [x.ends for x in lives]
    wait_for(lambda: server.server_pid() != pid and is_back(server), BACK_S, "ready again")
    assert run_one(server.grpc, Plan(body(5))).ends == ["length"]
    wait_until_idle(server)


def test_dead_stubs_leave_no_regions(server: RunningServer) -> None:
    """Each stub that died with requests in flight left one for as long as the server ran."""
    wait_for(lambda: is_back(server), BACK_S, "ready")
    regions = len(server.regions())
    for _ in range(3):
        victim = server.instance("toy_wave").pid
        under_load(server, victim, "wave")
        wait_for(lambda old=victim: is_back(server) and server.instance("toy_wave").pid != old, BACK_S, "ready again")
    wait_for(lambda: len(server.regions()) <= regions, BACK_S, "regions of dead stubs are unlinked")
    assert run_one(server.grpc, Plan(body(5))).ends == ["length"]


def test_killed_server_under_load(server: RunningServer) -> None:
    wait_until_back(server, BACK_S)
    pid = server.server_pid()
    lives = under_load(server, pid, "tokens")
    assert all(len(life.ends) == 1 and life.ends[0] != "timeout" for life in lives), [x.ends for x in lives]
    wait_for(lambda: server.server_pid() != pid and is_back(server), BACK_S, "ready again")
    assert run_one(server.grpc, Plan(body(5))).ends == ["length"]
    wait_until_idle(server)
