# SPDX-License-Identifier: Apache-2.0
"""The private folder of one running server: sockets, instance records, facts. Nothing of it outlives its owner.

A server's regions in /dev/shm carry the run's own prefix, and its processes carry the folder's random name in their
environment; so what a dead owner left can be told from everybody else's and removed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triton_omni.backends.config.paths import RUN_DIR_VARIABLE, start_time
from triton_omni.backends.supervisor.errors import Report
from triton_omni.backends.supervisor.serve import processes

SHM = Path("/dev/shm")
PREFIX = "omni-run-"
OWNER_FILE = "owner.json"
FACTS_FILE = "server.json"
HEALTH_FILE = "health.json"
_SOCKET_PATH_CHARS = 60  # a unix socket's path may have 107 characters; the rest is for names inside the folder


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

    def remove(self, known: Iterable[int] = ()) -> list[int]:
        """End the run's processes that are still there, remove its regions and the folder. Returns killed pids.

        `known` are pids that the run had before.
        """
        left = self.processes()
        killed = processes.end_all(left, processes.LEFTOVER_PATIENCE_S)
        self.remove_regions()
        remove_openmp_names({*left, *known})
        shutil.rmtree(self.path, ignore_errors=True)
        return killed

    def regions(self) -> list[Path]:
        """The run's names in /dev/shm."""
        return sorted(path for path in SHM.iterdir() if path.name.startswith(self.shm_prefix))

    def remove_regions(self) -> list[str]:
        """Unlink the run's names in /dev/shm; only when none of its processes is left."""
        removed = self.regions()
        for path in removed:
            path.unlink(missing_ok=True)
        return [path.name for path in removed]


def remove_openmp_names(pids: Iterable[int]) -> None:
    """Unlink what Intel's OpenMP (in the engines) leaves in /dev/shm when its process is killed."""
    for pid in pids:
        if not start_time(pid):
            (SHM / f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}").unlink(missing_ok=True)


def make() -> RunDir:
    """A new run folder (0700, random name) owned by this process."""
    base = tempfile.gettempdir()
    if len(base) > _SOCKET_PATH_CHARS:
        base = "/tmp"
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    run_dir = RunDir(path, f"omni{secrets.token_hex(6)}_", os.getpid(), start_time(os.getpid()))
    write_json(path / OWNER_FILE, {**asdict(run_dir), "path": str(path)})
    return run_dir


def write_json(path: Path, value: Any) -> None:
    """Write a file that readers see whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value, indent=1))
    draft.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if it is not there or not whole."""
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
