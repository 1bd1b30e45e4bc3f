# SPDX-License-Identifier: Apache-2.0
"""Ranks and their worker: the first to end ends the others; contradicting options are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.expect import accepts
from tests.kit.process_pidfds import is_gone
from triton_omni.backends.ar.environment import worker_environment
from triton_omni.backends.ar.ranks import check_ranks
from triton_omni.backends.core.engine import OptionsError

LIMIT_S = 60
WORKER = """
import multiprocessing, os, sys, threading
from types import SimpleNamespace
from triton_omni.backends.ar.ranks import die_with_worker, watch_ranks

def rank(ready):
    die_with_worker()
    ready.send(os.getpid())
    threading.Event().wait()  # as one that waits in a collective call

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = []
    for _ in range(2):
        ours, theirs = context.Pipe(duplex=False)
        ranks.append(SimpleNamespace(proc=context.Process(target=rank, args=(theirs,), daemon=True)))
        ranks[-1].proc.start()
        print(ours.recv(), flush=True)
    watch_ranks(SimpleNamespace(workers=ranks, is_failed=False))
    threading.Event().wait()
"""


@pytest.fixture
def worker(tmp_path):
    """A worker process and the pidfds of its two ranks."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script], env=environment, **pipes) as process:
        assert process.stdout is not None
        ranks = [os.pidfd_open(int(process.stdout.readline())) for _ in range(2)]
        yield process, ranks
        process.kill()
        for rank in ranks:
            os.close(rank)


@pytest.mark.timeout(180)
def test_no_rank_outlives_its_worker(worker):
    process, ranks = worker
    process.kill()
    assert all(is_gone(rank, LIMIT_S) for rank in ranks)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", [0, 1])
def test_the_worker_ends_with_any_of_its_ranks(worker, victim):
    process, ranks = worker
    signal.pidfd_send_signal(ranks[victim], signal.SIGKILL)
    assert process.wait(LIMIT_S) == 1
    assert all(is_gone(rank, LIMIT_S) for rank in ranks)
    assert f"rank {victim} of 2 died" in process.stderr.read()


@pytest.mark.parametrize(("ranks", "gpus"), [(2, 1), (1, 2), (4, 2)])
def test_ranks_that_the_instance_has_no_gpu_for_are_refused(ranks, gpus):
    with pytest.raises(OptionsError, match=r"stage 'thinker'.*tensor_parallel_size is .*gpus_per_instance"):
        check_ranks(ranks, gpus, "thinker")


def test_ranks_on_a_cpu_need_no_gpu():
    accepts(check_ranks, 2, None, "thinker")
    accepts(check_ranks, 2, 2, "thinker")


def test_ranks_meet_on_loopback_only():
    found = worker_environment({"tensor_parallel_size": 2}, "cpu", Path("/nowhere"))
    assert found["VLLM_HOST_IP"] == "127.0.0.1" and found["GLOO_SOCKET_IFNAME"] == "lo"
    assert found["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn" and found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "GLOO_SOCKET_IFNAME" not in worker_environment({}, "cpu", Path("/nowhere"))
    assert "VLLM_CPU_OMP_THREADS_BIND" not in worker_environment({"tensor_parallel_size": 2}, "cuda", Path("/nowhere"))
