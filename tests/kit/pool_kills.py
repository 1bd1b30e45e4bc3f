# SPDX-License-Identifier: Apache-2.0
"""A load on the toy pipeline whose stages have several workers each, while workers are killed one after another."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

from tests.kit.load_generator import Life, Plan, run_many
from tests.kit.server_calls import health
from tests.kit.triton_server import RunningServer, wait_for
from triton_omni.backends.repository import write

STAGES = ("tokens", "frames", "wave")
RECOVER_S = 60.0


def pool_repository(folder: Path, workers: int = 2) -> Path:
    """The toy's repository with `workers` workers per stage."""
    deploy = folder / "pool.yaml"
    stages = "\n".join(f"  {stage}: {{instances: {workers}}}" for stage in STAGES)
    deploy.write_text(f"pipeline: toy\norchestrator: {{max_queue: 2000}}\nstages:\n{stages}\n")
    write(folder / "repository", deploy)
    return folder / "repository" / "toy"


def plan(words: int) -> Plan:
    """A request for text and audio, slow enough to be met by a death in all its phases."""
    stages = {"tokens": {"delay_s": 0.02}}
    body = {"messages": [{"role": "user", "content": "go"}], "modalities": ["text", "audio"]}
    return Plan({**body, "sampling": {"max_tokens": words}, "stages": stages}, timeout_s=120)


class Killer:
    """Kills a worker of a random stage, each time when all are ready, until it is stopped."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.kills = 0
        self.error: Exception | None = None

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * RECOVER_S)
        assert not self._thread.is_alive()
        assert self.error is None, self.error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._all_ready()
                stage = self._rng.choice(STAGES)
                pid = self._rng.choice(health(self._server)["stages"][stage]["worker_pids"])
                os.kill(pid, signal.SIGKILL)
                self.kills += 1
                wait_for(lambda: self._restarts() >= self.kills, RECOVER_S, "the death is noticed")
            self._all_ready()
        except Exception as error:  # noqa: BLE001 (shown by the thread of the test)
            self.error = error

    def _restarts(self) -> int:
        return sum(health(self._server)["stages"][stage]["restarts"] for stage in STAGES)

    def _all_ready(self) -> None:
        wait_for(lambda: health(self._server)["state"] == "ready", RECOVER_S, "all workers are ready")


def judge(lives: list[Life]) -> dict[str, int]:
    """How many requests completed, and how many failed with output; an AssertionError for any other fate."""
    fates = {"completed": 0, "failed with output": 0}
    for life in lives:
        assert len(life.ends) == 1 and not life.late and not life.order_errors, life
        if life.ends == ["length"]:
            fates["completed"] += 1
        else:
            assert "stage_failed" in life.ends[0] and "worker died" in life.ends[0], life.ends
            assert life.counts["text"] + life.counts["audio"] > 0, f"no output, and yet it failed: {life}"
            fates["failed with output"] += 1
    return fates


def load_under_kills(server: RunningServer, requests: int, seed: int) -> tuple[dict[str, int], int]:
    """Fates of `requests` requests of several lengths, 12 at a time, and the number of kills meanwhile."""
    rng = random.Random(seed)
    plans = [plan(rng.choice((3, 20, 60))) for _ in range(requests)]
    with Killer(server, seed) as killer:
        lives = run_many(server.grpc, plans, 12)
    return judge(lives), killer.kills
