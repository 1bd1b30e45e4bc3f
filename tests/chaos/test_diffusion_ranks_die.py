# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose instance is two ranks, on the real server: it draws, loses a rank under load, and is whole again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.load_generator import Life, Plan, run_many, run_one
from tests.kit.process_pidfds import is_gone
from tests.kit.server_calls import health, wait_until_idle, wait_until_restarted
from tests.kit.triton_server import RunningServer, running_server, wait_for
from triton_omni.backends.control import probe
from triton_omni.backends.repository import write

pytestmark = [pytest.mark.triton, pytest.mark.models, pytest.mark.timeout(600)]

BACK_S = 240.0  # two processes import torch, one after the other, maybe on a busy machine
REQUESTS = 6
DIED = "error [stage_failed:denoiser] the stage's worker died"
DEPLOY = """
pipeline: image
stages:
  denoiser:
    device: cpu
    engine: {model: "package:digits", step_overhead_tokens: 2000, parallel: {cfg: 2}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "deploy.yaml").write_text(DEPLOY)
    write(folder, folder / "deploy.yaml")
    with running_server([folder / "image"]) as running:
        yield running
    assert running.processes() == []


def image(steps: int, seed: int = 1) -> dict[str, Any]:
    options = {"width": 128, "height": 128, "steps": steps, "seed": seed, "negative_prompt": " ", "true_cfg_scale": 2.5}
    return {"operation": "image", "input": "a red 7 on a yellow background", "stages": {"denoiser": options}}


def stage(server: RunningServer) -> dict[str, Any]:
    return health(server, "image")["stages"]["denoiser"]


def worker(server: RunningServer) -> int:
    (pid,) = stage(server)["worker_pids"]
    return pid


def rank(server: RunningServer) -> int:
    """The one child of the worker."""
    pid = worker(server)
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def under_load(server: RunningServer, victim: Callable[[RunningServer], int]) -> list[str]:
    """SIGKILL a process while all requests are drawn; their ends. Then all is as before."""
    before, lives, restarts = (worker(server), rank(server)), list[Life](), stage(server)["restarts"]
    pidfds = [os.pidfd_open(pid) for pid in before]
    plans = [Plan(image(200, seed), "image", timeout_s=BACK_S) for seed in range(REQUESTS)]
    clients = threading.Thread(target=lambda: lives.extend(run_many(server.grpc, plans, REQUESTS)))
    clients.start()
    address = server.instance("image_denoiser").address
    wait_for(lambda: probe(address, 5).live == REQUESTS, 60, "all are drawn")
    os.kill(victim(server), signal.SIGKILL)
    clients.join(BACK_S)
    assert all(len(life.ends) == 1 and life.late == 0 for life in lives), [life.ends for life in lives]
    assert all(is_gone(pidfd, 30.0) for pidfd in pidfds), "both ranks are gone"
    for pidfd in pidfds:
        os.close(pidfd)
    wait_until_restarted(server, "denoiser", restarts, "image", BACK_S)
    wait_until_idle(server, "image")
    assert run_one(server.grpc, Plan(image(4), "image", timeout_s=BACK_S)).ends == ["stop"]
    assert not {worker(server), rank(server)} & set(before)
    return [life.ends[0] for life in lives]


def test_an_image_is_drawn_by_two_ranks(server: RunningServer) -> None:
    life = run_one(server.grpc, Plan(image(8), "image", timeout_s=BACK_S))
    assert (life.ends, life.counts["image"]) == (["stop"], 1)
    assert rank(server) != worker(server)


@pytest.mark.chaos
def test_a_follower_that_dies_under_load_is_one_clear_error_each(server: RunningServer) -> None:
    assert under_load(server, rank) == [DIED] * REQUESTS
    assert "StageFailed: rank 1 of 2 died by SIGKILL" in server.log.read_text()


@pytest.mark.chaos
def test_a_leader_that_dies_takes_its_follower_along(server: RunningServer) -> None:
    assert under_load(server, worker) == [DIED] * REQUESTS
