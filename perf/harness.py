# SPDX-License-Identifier: Apache-2.0
"""What the measurements share: a bare server, the real perf_analyzer, and CPU seconds of processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triton_omni.backends.control.records import read_records
from triton_omni.backends.supervisor.home import REPO, find_home
from triton_omni.backends.supervisor.serve import processes, run_folder
from triton_omni.backends.supervisor.serve.launch import LOCAL, Launch, free_ports, log_errors
from triton_omni.backends.supervisor.serve.locate import find_server

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
EXPORT_TRIES = 5
INPUTS = Path(__file__).parent / "inputs"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Server:
    """A ready server of ours."""

    grpc: str
    run_dir: Path
    pid: int

    def pids(self) -> dict[str, int]:
        """Role of each process → pid: "server", "<model> stub", "<model> worker" (of its first instance)."""
        found = {"server": self.pid}
        for pid in _children(self.pid):
            model = _stub_model(pid)
            if model:
                found[f"{model} stub"] = pid
        for record in read_records(self.run_dir):
            if record.worker_pid:
                found[f"{record.model} worker"] = record.worker_pid
        return found


@contextmanager
def bare_server(repositories: Sequence[Path], variables: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A plain tritonserver on free ports, ended with the `with` body."""
    with tempfile.TemporaryDirectory(prefix="omni-perf-") as folder:
        log, ports, run_dir = Path(folder) / "server.log", free_ports(), run_folder.make()
        server = find_server(find_home())
        server = replace(server, environment={**server.environment, **(variables or {})})
        launch = Launch(server, [Path(r).resolve() for r in repositories], ports, run_dir, exit_timeout_s=10)
        child = launch.start(log)
        try:
            api = launch.api()
            processes.wait_until(lambda: api.is_ready(2.0) or child.poll() is not None, READY_TIMEOUT_S)
            if child.poll() is not None or not api.is_ready(2.0):
                raise RuntimeError(f"server not ready:\n{log_errors(log)}")
            yield Server(f"{LOCAL}:{ports.grpc}", run_dir.path, child.pid)
        finally:
            processes.stop(child, STOP_TIMEOUT_S)
            run_dir.remove()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted({int(child) for task in tasks for child in (task / "children").read_text().split()})


def _stub_model(pid: int) -> str:
    """The model whose stub a process is; empty for another process."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    model_file = next((Path(word) for word in words if word.endswith("/model.py")), None)
    return "" if model_file is None else model_file.parent.parent.name


def repository(pipeline: str) -> Path:
    """The committed model repository of a pipeline."""
    return REPO / "model_repository" / pipeline


def request_json(pipeline: str) -> str:
    """The measured request of a pipeline, as JSON: the only one of its perf_analyzer input file."""
    [inputs] = json.loads((INPUTS / f"{pipeline}.json").read_text())["data"]
    return inputs["request"][0]


def request_only(pipeline: str, folder: Path) -> Path:
    """A copy of a pipeline's repository whose public model takes the input `request` alone, and must have it.

    perf_analyzer's --shared-memory refuses models with optional inputs.
    """
    copied = Path(shutil.copytree(repository(pipeline), folder / pipeline))
    config = copied / pipeline / "config.pbtxt"
    lines = config.read_text().splitlines()
    kept = [line for line in lines if not line.startswith("input ") or 'name: "request"' in line]
    config.write_text("\n".join(kept).replace(" optional: true", "") + "\n")
    return copied


def cpu_s(pid: int) -> float:
    """CPU seconds, user and system, that a process has used."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class CpuClock:
    """CPU seconds per role between its making and `spent`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._before = {role: cpu_s(pid) for role, pid in self._pids.items()}

    def spent(self) -> dict[str, float]:
        return {role: cpu_s(pid) - self._before[role] for role, pid in self._pids.items()}


@dataclass(frozen=True)
class Analysis:
    """One run of perf_analyzer.

    requests  what its export says of each request: timestamps in ns, outputs of each response
    cpu_s     CPU seconds that each watched process used meanwhile
    """

    command: list[str]
    exit_code: int
    text: str
    requests: list[dict[str, Any]]
    cpu_s: dict[str, float]


def analyze(
    url: str,
    model: str,
    inputs: Mapping[str, Any],
    flags: Sequence[str],
    pids: Mapping[str, int] | None = None,
    timeout_s: float = 900.0,
) -> Analysis:
    """Run perf_analyzer over gRPC streams; every request has the same `inputs` (tensor name → value).

    perf_analyzer 2.51 reads a wild pointer for each output that a response does not carry, and when those bytes are
    no number its export is cut short or empty, with exit status 0: such a run is repeated.
    """
    where = ["-m", model, "-u", url, "-i", "grpc", "--streaming", "--async"]
    analysis = _analyze_once([*where, *flags], inputs, pids or {}, timeout_s)
    for _ in range(EXPORT_TRIES - 1):
        if analysis.exit_code or analysis.requests:
            break
        analysis = _analyze_once([*where, *flags], inputs, pids or {}, timeout_s)
    return analysis


def _analyze_once(
    flags: Sequence[str], inputs: Mapping[str, Any], pids: Mapping[str, int], timeout_s: float
) -> Analysis:
    with tempfile.TemporaryDirectory(prefix="omni-perf-") as folder:
        data, export = Path(folder) / "input.json", Path(folder) / "export.json"
        data.write_text(json.dumps({"data": [{name: [value] for name, value in inputs.items()}]}))
        command = [
            str(find_home().perf_analyzer),
            *("--input-data", str(data), "--profile-export-file", str(export), *flags),
        ]
        clock = CpuClock(pids)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=folder)
        return Analysis(command, done.returncode, done.stdout + done.stderr, _exported(export), clock.spent())


def _exported(path: Path) -> list[dict[str, Any]]:
    """The requests of an export; empty if it is not whole."""
    try:
        experiments = json.loads(path.read_text(errors="replace"))["experiments"]
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return [request for experiment in experiments for request in experiment["requests"]]
