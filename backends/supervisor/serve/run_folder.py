# SPDX-License-Identifier: Apache-2.0
"""The private folder of one running server: sockets, instance records, temporary files, facts.

A server's regions in /dev/shm carry the run's own prefix, and its processes carry the folder's random name in their
environment, so that what a dead owner left can be identified and removed. Two leftovers of killed processes carry no
name of ours: OpenMP's in /dev/shm and the Python backend's in /tmp; those that no living process can own are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triton_omni.backends.config.paths import RUN_DIR_VARIABLE, start_time
from triton_omni.backends.supervisor.errors import Report
from triton_omni.backends.supervisor.serve import processes

SHM = Path("/dev/shm")
TMP = Path("/tmp")  # the Python backend makes its folders there, whatever TMPDIR says
PYTHON_BACKEND = "libtriton_python.so"
PREFIX = "omni-run-"
OWNER_FILE = "owner.json"
FACTS_FILE = "server.json"
HEALTH_FILE = "health.json"
_SOCKET_PATH_CHARS = 60  # a unix socket's path may have 107 characters; the rest is for names inside the folder
_NEW_REGION_S = 30.0


@dataclass(frozen=True)
class RunDir:
    """One run's folder, the prefix of its shared-memory regions and the process that owns both."""

    path: Path
    shm_prefix: str
    owner_pid: int
    owner_start_time: int

    @property
    def mark(self) -> str:
        """What the environment of every process of this run holds."""
        return f"{RUN_DIR_VARIABLE}={self.path}"

    def processes(self) -> list[int]:
        """Pids of the run's living processes."""
        return processes.marked(self.mark)

    @property
    def temporary(self) -> Path:
        """The folder for temporary files of the server and its workers; made if missing."""
        folder = self.path / "tmp"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def remove(self) -> list[int]:
        """End the run's remaining processes, remove its regions and the folder. Returns killed pids."""
        killed = processes.end_all(self.processes(), processes.LEFTOVER_PATIENCE_S)
        self.remove_leftovers()
        shutil.rmtree(self.path, ignore_errors=True)
        return killed

    def regions(self) -> list[Path]:
        """The run's names in /dev/shm."""
        return sorted(path for path in SHM.iterdir() if path.name.startswith(self.shm_prefix))

    def remove_leftovers(self) -> None:
        """Remove what the run's processes left outside its folder; only when none of them is left."""
        for path in self.regions():
            path.unlink(missing_ok=True)
        remove_unnamed()

    def remove_dead_regions(self, server_pid: int) -> list[str]:
        """Unlink the regions of dead stubs while the server runs; returns their names.

        The server keeps a region mapped when its stub died with requests in flight. Regions that no other process maps
        are removed, except new ones, whose stub may be about to map them.
        """
        old = [path for path in self.regions() if time.time() - path.stat().st_mtime > _NEW_REGION_S]
        maps = processes.mapped(pid for pid in self.processes() if pid != server_pid) if old else ""
        dead = [path for path in old if str(path) not in maps]
        for path in dead:
            path.unlink(missing_ok=True)
        return [path.name for path in dead]


def remove_unnamed() -> None:
    """Remove what killed processes of this user left without a name of ours.

    Intel's OpenMP (in engines) names a file in /dev/shm after its pid. Each process with Triton's Python backend makes
    an empty folder /tmp/python_env_* after its start: one that is older than every such process has no owner.
    """
    for path in SHM.glob(f"__KMP_REGISTERED_LIB_*_{os.getuid()}"):
        pid = path.name.split("_")[-2]
        if pid.isdigit() and not start_time(int(pid)):
            path.unlink(missing_ok=True)
    folders = [path for path in TMP.glob("python_env_*") if path.is_dir() and path.stat().st_uid == os.getuid()]
    if not folders:
        return
    pids = [int(entry.name) for entry in processes.PROC.iterdir() if entry.name.isdigit()]
    starts = [processes.started_at(pid) for pid in pids if PYTHON_BACKEND in processes.mapped([pid])]
    for folder in folders:
        with contextlib.suppress(OSError):  # it holds a model's environment, or is gone
            if not any(0 < start <= folder.stat().st_mtime + 1 for start in starts):
                folder.rmdir()


def make() -> RunDir:
    """A new run folder (0700, random name) owned by this process."""
    base = tempfile.gettempdir()
    if len(base) > _SOCKET_PATH_CHARS:
        base = "/tmp"
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    run_dir = RunDir(path, f"omni{secrets.token_hex(6)}_", os.getpid(), start_time(os.getpid()))
    write_json(path / OWNER_FILE, {**asdict(run_dir), "path": str(path)})
    return run_dir


def write_json(path: Path, value: object) -> None:
    """Write a file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value, indent=1))
    draft.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if it is missing or not JSON."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def all_runs(base: Path | None = None) -> Iterator[RunDir]:
    """This user's run folders, of living and of dead owners."""
    for path in sorted((base or Path(tempfile.gettempdir())).glob(f"{PREFIX}*")):
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o077:
            continue
        owner = read_json(path / OWNER_FILE)
        if owner is not None:
            yield RunDir(path, str(owner["shm_prefix"]), int(owner["owner_pid"]), int(owner["owner_start_time"]))


def facts_of(grpc_port: str) -> dict[str, Any] | None:
    """The facts of this user's server with this gRPC port, if it is supervised; see Supervisor."""
    for run_dir in all_runs():
        facts = read_json(run_dir.path / FACTS_FILE)
        if facts is not None and str(facts["grpc_port"]) == grpc_port:
            return facts
    return None


def sweep(report: Report, base: Path | None = None) -> list[Path]:
    """Remove what dead owners left: processes, regions, folders. Returns the folders removed."""
    swept: list[Path] = []
    for run_dir in all_runs(base):
        if processes.is_alive(run_dir.owner_pid, run_dir.owner_start_time):
            continue
        killed = run_dir.remove()
        swept.append(run_dir.path)
        report(f"removed what a dead server left: {run_dir.path}" + (f", killed pids {killed}" if killed else ""))
    return swept + sweep_bare(base)


def sweep_bare(base: Path | None = None) -> list[Path]:
    """Remove run folders of servers that were started by hand and are dead; their names are pid and start time."""
    swept: list[Path] = []
    for path in ((base or Path(tempfile.gettempdir())) / f"triton-omni-{os.getuid()}").glob("*-*"):
        pid, _, started = path.name.partition("-")
        if pid.isdigit() and started.isdigit() and not processes.is_alive(int(pid), int(started)):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept
