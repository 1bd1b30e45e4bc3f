# SPDX-License-Identifier: Apache-2.0
"""A stage whose worker joins from another host, under the real server; and 10,000 random requests over TCP."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.kit.budgets import DEATH_SEEN_S, RECOVERED_S
from tests.kit.fuzzed_requests import live, random_plan, report
from tests.kit.load_generator import Plan, body, run_one
from tests.kit.server_calls import health, wait_until_back, wait_until_idle
from tests.kit.tcp_ends import KEY
from tests.kit.triton_server import RunningServer, running_server, toy_repository, wait_for
from triton_omni.backends.control.address import TOKEN_VARIABLE, parse_address
from triton_omni.backends.supervisor.home import REPO

pytestmark = pytest.mark.triton


def deploy_of(folder: Path, *placed: str) -> Path:
    """A repository of the toy whose `placed` stages wait for workers."""
    key = folder / "link.key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    lines = [
        "pipeline: toy",
        f"links: {{host: 127.0.0.1, key_file: {key}}}",
        "orchestrator: {max_queue: 1024}",
        "stages:",
    ]
    for stage in ("tokens", "frames", "wave"):
        lines.append(f"  {stage}: " + ("{device: cpu, place: {by: external}}" if stage in placed else "{}"))
    return toy_repository(folder, "\n".join(lines) + "\n")


@contextlib.contextmanager
def joined(server: RunningServer, stage: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker started by the command that `doctor` shows, as if on another host."""
    wait_for(lambda: bool(server.instance(f"toy_{stage}").placement), RECOVERED_S, f"the command of {stage}")
    command = server.instance(f"toy_{stage}").placement
    words = [sys.executable if word == "python" else word for word in shlex.split(command.partition("with: ")[2])]
    worker = subprocess.Popen(words, env=os.environ | {TOKEN_VARIABLE: f"host of {stage}"}, cwd=REPO)
    try:
        wait_for(lambda: health(server)["stages"][stage]["state"] == "ready", RECOVERED_S, f"{stage} ready")
        yield worker
    finally:
        worker.kill()
        worker.wait(30)


def test_a_worker_joins_serves_dies_and_another_takes_its_place(tmp_path: Path) -> None:
    with running_server([deploy_of(tmp_path, "frames")], supervised=True) as server:
        assert health(server)["stages"]["frames"]["state"] == "waiting"
        assert run_one(server.grpc, Plan(body(3, ("text",)), timeout_s=30)).ends == ["length"], "text needs no frames"
        refused = run_one(server.grpc, Plan(body(3, ("audio",)), timeout_s=30)).ends
        assert refused == ["error [unavailable:frames] the stage waits for a worker to join"]
        with joined(server, "frames") as worker:
            wait_until_back(server, RECOVERED_S)
            where = parse_address(server.instance("toy_frames").address)
            assert where.tcp and not where.is_local
            assert server.instance("toy_frames").worker_pid == 0, "a pid of another host is none of ours"
            assert run_one(server.grpc, Plan(body(30), timeout_s=30)).ends == ["length"]
            kill = partial(worker.send_signal, signal.SIGKILL)  # when the first piece is there
            life = run_one(
                server.grpc, Plan(body(10, ("audio",), frames={"hold_after": 3}), timeout_s=30, reading=kill)
            )
            assert len(life.ends) == 1 and "[stage_failed:frames] the stage's worker died" in life.ends[0], life.ends
            wait_for(lambda: health(server)["stages"]["frames"]["state"] == "waiting", DEATH_SEEN_S, "it waits again")
        with joined(server, "frames"):
            wait_until_back(server, RECOVERED_S)
            assert run_one(server.grpc, Plan(body(30), timeout_s=30)).ends == ["length"]
            wait_until_idle(server)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_thousand_random_requests_over_tcp(tmp_path: Path) -> None:
    rng = random.Random(13)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_server([deploy_of(tmp_path, "tokens", "frames", "wave")]))
        workers = [stack.enter_context(joined(server, stage)) for stage in ("tokens", "frames", "wave")]
        fds = [len(os.listdir(f"/proc/{worker.pid}/fd")) for worker in workers]
        for _ in range(20):
            tally = live(server.grpc, [random_plan(rng) for _ in range(500)], 16)
            print(report(tally))
            assert not tally.faults, tally.faults[:5]
        wait_until_idle(server)
        assert [worker.poll() for worker in workers] == [None] * 3
        for worker, before in zip(workers, fds, strict=True):
            assert len(os.listdir(f"/proc/{worker.pid}/fd")) <= before + 6, "at most the links to its peers"
