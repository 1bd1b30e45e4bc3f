# SPDX-License-Identifier: Apache-2.0
"""What ours is compared with, each in a process of its own that waits for its turn.

`OneProcess` holds a pipeline's engines without a server, `VllmServer` is vLLM's own OpenAI server, `Diffusers` is
diffusers' own pipeline (`python -m perf.rivals FOLDER FD` is its process).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx

from perf import inprocess
from perf.harness import cpu_s
from perf.measures import Piece, RequestTrace
from triton_omni.backends.config import paths
from triton_omni.backends.pipelines import load
from triton_omni.backends.supervisor.home import find_home
from triton_omni.backends.supervisor.serve.launch import LOCAL, free_ports

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Worker:
    """A child that answers one JSON line per JSON line."""

    process: subprocess.Popen[str]
    answers: TextIO

    def ask(self, question: object) -> Any:
        """Its answer; RuntimeError if it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self.answers.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait(STOP_TIMEOUT_S)}")
        return json.loads(line)

    @classmethod
    @contextmanager
    def started(cls, words: list[str], variables: Mapping[str, str]) -> Iterator[Worker]:
        """`python -m WORDS… FD`, ready; its output goes to a file that is shown if it fails."""
        ours, theirs = os.pipe()
        with tempfile.TemporaryFile("w+") as log, os.fdopen(ours) as answers:
            child = subprocess.Popen(
                [str(find_home().engine_python), "-m", *words, str(theirs)],
                env=os.environ | dict(variables), pass_fds=[theirs], stdin=subprocess.PIPE, text=True,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            os.close(theirs)
            try:
                if answers.readline() != "ready\n":
                    log.seek(0)
                    raise RuntimeError(f"{' '.join(words)} did not start:\n{log.read()[-4000:]}")
                yield cls(child, answers)
            finally:
                end(child)


def end(child: subprocess.Popen[str], sign: signal.Signals = signal.SIGTERM) -> None:
    """End a child that may have ended, and its group if it leads one."""
    if child.poll() is None:
        child.send_signal(sign)
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(STOP_TIMEOUT_S)


@dataclass(frozen=True)
class OneProcess:
    """A pipeline's engines in one process; the request is that of perf/inputs."""

    worker: Worker

    def load(self, streams: int, count: int, how: str = "") -> tuple[list[RequestTrace], float]:
        """The requests of a load, and the CPU seconds of all threads. `how` "whole": see perf.inprocess."""
        spent_s, found = self.worker.ask([streams, count, how])
        traces = [
            RequestTrace(one["start_s"], [Piece(**piece) for piece in one["pieces"]], one["end_s"], one["completed"])
            for one in found
        ]
        return traces, spent_s


@contextmanager
def one_process(pipeline: str) -> Iterator[OneProcess]:
    """The engines by the committed deploy file."""
    variables = inprocess.environment(load(pipeline))
    with Worker.started(["perf.inprocess", pipeline, "--answers"], variables) as worker:
        yield OneProcess(worker)


@dataclass(frozen=True)
class VllmServer:
    """A ready server. `model` is what requests name."""

    root: str
    model: str
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds of the server and all its descendants so far."""
        return sum(cpu_s(pid) for pid in descendants(self.pid))


@contextmanager
def vllm_server(model: Path, variables: Mapping[str, str], *flags: str) -> Iterator[VllmServer]:
    """`vllm serve` of a checkpoint folder with the variables that our worker gets, but with its own layout of
    processes."""
    port = free_ports().http
    own = {k: v for k, v in variables.items() if k not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "TORCH_COMPILE_DISABLE")}
    words = [str(find_home().engine_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    words += ["--host", LOCAL, "--port", str(port), "--served-model-name", "m", *flags]
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            words, env=os.environ | own | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=subprocess.STDOUT, text=True
        )
        try:
            root = f"http://{LOCAL}:{port}"
            until_s = time.monotonic() + READY_TIMEOUT_S
            while not _is_up(root):
                if child.poll() is not None or time.monotonic() > until_s:
                    log.seek(0)
                    raise RuntimeError(f"vLLM's server did not start:\n{log.read()[-4000:]}")
                time.sleep(0.5)
            yield VllmServer(root, "m", child.pid)
        finally:
            end(child, signal.SIGINT)


def _is_up(root: str) -> bool:
    try:
        return httpx.get(f"{root}/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(word) for word in task.read_text().split()]
    return found


@contextmanager
def diffusers(folder: Path) -> Iterator[Worker]:
    """diffusers' pipeline of a folder, one thread; asked by {"prompts", "seeds", "batch"}, it answers with the seconds
    from the start to the end of each image, and the CPU seconds."""
    with Worker.started(["perf.rivals", str(folder)], {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}) as worker:
        yield worker


def _serve_diffusers(folder: str, answers: TextIO) -> None:
    import torch

    from triton_omni.backends.diffusion.upstream import QwenImagePipeline, be_quiet

    be_quiet()
    pipe: Any = QwenImagePipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, seeds, options = asked["prompts"], asked["seeds"], asked["options"]
        size = len(prompts) if asked["batch"] else 1
        started_s, cpu_started_s, ends_s = time.monotonic(), time.process_time(), list[float]()
        for first in range(0, len(prompts), size):
            texts = prompts[first : first + size]
            generators = [torch.Generator().manual_seed(seed) for seed in seeds[first : first + size]]
            made = pipe(texts, negative_prompt=[" "] * len(texts), generator=generators, **options).images
            ends_s += [time.monotonic() - started_s] * len(made)
        print(json.dumps([ends_s, time.process_time() - cpu_started_s]), file=answers, flush=True)


if __name__ == "__main__":
    with open(int(sys.argv[2]), "w") as out:
        _serve_diffusers(sys.argv[1], out)


def models_dir() -> Path:
    """The folder of the embedded default's weights."""
    return Path(paths.models_dir())
