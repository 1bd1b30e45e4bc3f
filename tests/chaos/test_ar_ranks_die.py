# SPDX-License-Identifier: Apache-2.0
"""A thinker on two ranks in a real server: what dies with what, and that the stage comes back saying the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.load_generator import Life, Plan, run_many
from tests.kit.process_pidfds import is_gone
from tests.kit.server_calls import health, wait_until_idle, wait_until_restarted
from tests.kit.triton_server import RunningServer, running_server, wait_for
from triton_omni import Client, GenerateRequest, Message, Sampling

pytestmark = [pytest.mark.triton, pytest.mark.chaos, pytest.mark.timeout(1200)]
PIPELINE = "qwen3_omni_text"
DIED = "error [stage_failed:thinker] the stage's worker died"
BACK_S, GONE_S = 400.0, 10.0  # two ranks import vLLM again


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    pytest.importorskip("transformers", reason="needs the engine environment (make setup)")
    from tests.kit.tiny_omni import tiny_omni

    folder = tmp_path_factory.mktemp("ranks")
    engine = {"model": str(tiny_omni(folder / "model")), "dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
    engine |= {"tensor_parallel_size": 2, "max_model_len": 2048}
    stages = {"thinker": {"device": "cpu", "start_timeout_s": BACK_S, "engine": engine}}
    file = folder / "deploy.yaml"
    file.write_text(yaml.safe_dump({"pipeline": PIPELINE, "stages": stages}), encoding="utf-8")
    command = [sys.executable, "-m", "triton_omni.cli", "repository", "--pipeline", PIPELINE]
    subprocess.run([*command, "--deploy", str(file), "--out", str(folder)], check=True, timeout=60)
    with running_server([folder / PIPELINE], supervised=True, timeout_s=BACK_S) as running:
        yield running
    assert running.processes() == [], "a rank is left"


def stage(server: RunningServer) -> dict[str, Any]:
    return health(server, PIPELINE)["stages"]["thinker"]


def worker_of(server: RunningServer) -> int:
    return stage(server)["worker_pids"][0]


def ranks_of(worker: int) -> list[int]:
    """Pids of the ranks, by number; vLLM gives them their names."""
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text(encoding="ascii").split()
    names = {Path(f"/proc/{child}/cmdline").read_bytes().rstrip(b"\0 ").decode(): int(child) for child in children}
    return [names[name] for name in sorted(names) if name.startswith("VLLM::Worker_TP")]


def says(server: RunningServer) -> str:
    request = GenerateRequest(
        messages=(Message("user", "hello world"),), sampling=Sampling(temperature=0.0, max_tokens=20)
    )
    with Client(server.grpc) as client:
        return "".join(piece.text or "" for piece in client.generate(PIPELINE, request, timeout_s=120))


@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "worker"])
def test_a_death_ends_every_request_once_and_leaves_no_process(server: RunningServer, victim: str) -> None:
    before, restarts = says(server), stage(server)["restarts"]
    worker = worker_of(server)
    ranks = ranks_of(worker)
    assert len(ranks) == 2
    everybody = [os.pidfd_open(pid) for pid in (*ranks, worker)]
    words = {"messages": [{"role": "user", "content": "hello"}], "modalities": ["text"]}
    words |= {"sampling": {"max_tokens": 1900, "ignore_eos": True, "temperature": 0.0}}
    lives: list[Life] = []
    clients = threading.Thread(
        target=lambda: lives.extend(run_many(server.grpc, [Plan(words, PIPELINE, timeout_s=300)] * 4, 4))
    )
    clients.start()
    wait_for(lambda: stage(server)["live"] == 4, 60, "all are running")
    signal.pidfd_send_signal(everybody[2 if victim == "worker" else int(victim[-1])], signal.SIGKILL)
    assert all(is_gone(process, GONE_S) for process in everybody)
    clients.join(GONE_S)
    assert [life.ends for life in lives] == [[DIED]] * 4
    wait_until_restarted(server, "thinker", restarts, PIPELINE, BACK_S)
    assert says(server) == before
    wait_until_idle(server, PIPELINE, timeout_s=10)
    assert len(ranks_of(worker_of(server))) == 2
    for process in everybody:
        os.close(process)
