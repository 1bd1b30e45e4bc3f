# SPDX-License-Identifier: Apache-2.0
"""`triton-omni top` and `doctor` beside a supervised server, whose index of models is restricted."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.kit.load_generator import Plan, abort, body, run_one
from tests.kit.server_calls import health, wait_until_idle
from tests.kit.triton_server import TOY_REPOSITORY, RunningServer, running_server, wait_for
from triton_omni.backends.supervisor.home import find_home

pytestmark = pytest.mark.triton
COMMAND_S = 60


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server([TOY_REPOSITORY], supervised=True) as running:
        run_one(running.grpc, Plan(body(2)))  # stages show their steps once a run has ended
        yield running


@pytest.fixture
def held(server: RunningServer) -> Iterator[str]:
    """A request that runs until the test is over."""
    plan = Plan(body(4, ("text", "audio"), wave={"hold_after": 2}), request_id="held-one")
    client = threading.Thread(target=run_one, args=(server.grpc, plan))
    client.start()
    wait_for(lambda: health(server)["stages"]["wave"]["live"] == 1, 20, "a running request")
    yield "held-one"
    abort(server.grpc, "toy", "held-one")
    client.join(20)
    wait_until_idle(server, timeout_s=20)


def command(server: RunningServer, *words: str) -> str:
    """What the command line says about the server."""
    port = f"127.0.0.1:{server.metrics_port}"
    done = subprocess.run(
        [sys.executable, "-m", "triton_omni.cli", *words, "--triton", server.grpc, "--metrics", port],
        capture_output=True, text=True, timeout=COMMAND_S, check=False, cwd=find_home().root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_one_view_as_json_shows_pipelines_stages_and_requests(server: RunningServer, held: str) -> None:
    [line] = command(server, "top", "--once", "--json").splitlines()
    state = json.loads(line)["pipelines"]["toy"]
    assert (state["ready"], state["live"], state["queued"]) == (True, 1, 0)
    for stage in ("tokens", "frames", "wave"):
        facts = state["stages"][stage]
        assert (facts["state"], facts["ready"], facts["restarts"]) == ("ready", 1, 0)
        assert facts["steps"] > 0
    [request] = state["requests"]
    assert request["id"] == held
    assert request["phase"] in ("opening", "answering")
    assert request["age_s"] > 0
    assert "wave" in request["stages"]
    assert set(request["pieces"]) == {"text", "audio"}


def test_one_view_for_people(server: RunningServer, held: str) -> None:
    shown = command(server, "top", "--once")
    assert "toy" in shown and "ready" in shown
    assert f"'{held}'" in shown and "at wave" in shown
    assert "steps" in shown and "restarts 0" in shown


def test_the_waterfall_of_an_ended_request(server: RunningServer) -> None:
    run_one(server.grpc, Plan(body(3, ("text", "audio")), request_id="ended-one"))
    wait_until_idle(server, timeout_s=20)
    trace = json.loads(command(server, "top", "--request", "ended-one", "--json"))
    assert (trace["pipeline"], trace["outcome"]) == ("toy", "completed")
    spans = {span["name"]: span for span in trace["spans"]}
    assert {"queue", "tokens", "frames", "wave", "client text", "client audio"} == set(spans)
    assert all(0 <= span["start_s"] <= span["end_s"] <= trace["total_s"] + 1 for span in spans.values())
    assert "wave" in command(server, "top", "--request", "ended-one")


def test_doctor_finds_the_pipelines(server: RunningServer) -> None:
    assert "toy: ready, 0 live, 0 queued" in command(server, "doctor", "--no-setup")
