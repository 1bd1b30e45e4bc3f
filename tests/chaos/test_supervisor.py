# SPDX-License-Identifier: Apache-2.0
"""Kill what a supervisor watches, on a real tritonserver with tiny models: everything comes back, nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.recorded_model import write_recorded_models
from tests.kit.triton_server import RunningServer, running_server, wait_for
from triton_omni.backends.supervisor.serve import processes, run_folder

pytestmark = [pytest.mark.triton, pytest.mark.timeout(240)]
BACK_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    repository = write_recorded_models(tmp_path / "repository", {"toy": "orchestrator", "step": "stage"})
    patience = ["--silent-s", "8", "--stage-silent-s", "8"]
    with running_server([repository], supervised=True, serve_options=patience) as running:
        yield running
    assert running.processes() == []
    assert running.regions() == []
    assert not running.run_dir.exists()


def answers(server: RunningServer, model: str) -> bool:
    tensor = {"name": "IN", "shape": [1], "datatype": "FP32", "data": [4.0]}
    try:
        status, answer = server.api.call("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]}, timeout_s=5.0)
    except OSError:
        return False
    return status == 200 and answer["outputs"][0]["data"] == [4.0]


def is_new(server: RunningServer, model: str, pid: int) -> bool:
    return any(i.model == model and i.pid != pid for i in server.instances())


def is_back(server: RunningServer) -> bool:
    return server.health() == "ready" and answers(server, "toy") and answers(server, "step")


def test_ready_and_restricted(server: RunningServer) -> None:
    assert is_back(server)
    strangers = type(server.api)(server.api.host, server.api.port)
    assert strangers.call("POST", "/v2/repository/index", {})[0] == 403
    for method, path in (("GET", "systemsharedmemory/status"), ("POST", "logging"), ("POST", "trace/setting")):
        assert strangers.call(method, f"/v2/{path}", {})[0] == 403
    assert server.api.models() == {"toy": ("READY", ""), "step": ("READY", "")}


def test_killed_stage_stub(server: RunningServer) -> None:
    before = server.instance("step")
    os.kill(before.pid, signal.SIGKILL)
    wait_for(lambda: is_new(server, "step", before.pid), BACK_S, "a new stub")
    wait_for(lambda: is_back(server), BACK_S, "ready again")


def test_killed_orchestrator_stub(server: RunningServer) -> None:
    before, pid = server.instance("toy"), server.server_pid()
    os.kill(before.pid, signal.SIGKILL)
    wait_for(lambda: server.server_pid() != pid, BACK_S, "a new server")
    wait_for(lambda: is_back(server), BACK_S, "ready again")


def test_killed_server(server: RunningServer) -> None:
    pid = server.server_pid()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: server.server_pid() != pid, BACK_S, "a new server")
    wait_for(lambda: is_back(server), BACK_S, "ready again")
    assert all(processes.start_time(i.pid) for i in server.instances())


def test_stopped_server_counts_as_hung(server: RunningServer) -> None:
    pid = server.server_pid()
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: server.server_pid() != pid, BACK_S, "a new server")
    wait_for(lambda: is_back(server), BACK_S, "ready again")


def test_silent_stage_is_reloaded(server: RunningServer) -> None:
    before = server.instance("step")
    mute = server.run_dir / "step.mute"
    mute.touch()
    wait_for(lambda: server.health() == "degraded", BACK_S, "the problem is seen")
    mute.unlink()
    wait_for(lambda: is_new(server, "step", before.pid), BACK_S, "a new stub")
    wait_for(lambda: is_back(server), BACK_S, "ready again")


def test_killed_supervisor_takes_its_server_along(tmp_path: Path) -> None:
    repository = write_recorded_models(tmp_path / "repository", {"step": "stage"})
    with running_server([repository], supervised=True) as running:
        os.kill(running.supervisor_pid, signal.SIGKILL)
        wait_for(lambda: not processes.start_time(running.pid), BACK_S, "the server follows its supervisor")
        assert running.run_dir.exists()
        swept = run_folder.sweep(print)
    assert running.run_dir in swept and not running.run_dir.exists()
    assert running.processes() == [] and running.regions() == []
