# SPDX-License-Identifier: Apache-2.0
"""Where things are on this machine, and the only file that reads our environment variables for it.

TRITON_OMNI_HOME           set-up's folder; default: `.runtime` beside the package, else ~/.cache/triton-omni
TRITON_OMNI_ENGINE_PYTHON  interpreter of the engine workers; default: the home's engine environment
TRITON_OMNI_MODELS         folder relative model names are resolved in; default: the home's models
TRITON_OMNI_RUN_DIR        private folder of one server's sockets and records; default: derived from the server
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

import backends


def home() -> Path:
    """Set-up's folder."""
    given = os.environ.get("TRITON_OMNI_HOME")
    if given:
        return Path(given)
    beside = Path(backends.__file__).resolve().parents[1] / ".runtime"
    return beside if beside.is_dir() else Path.home() / ".cache" / "triton-omni"


def engine_python() -> Path:
    """The interpreter that runs engine workers: ours if it was set up, else the one that runs now."""
    given = os.environ.get("TRITON_OMNI_ENGINE_PYTHON")
    if given:
        return Path(given)
    ours = home() / "engine" / "bin" / "python"
    return ours if ours.exists() else Path(sys.executable)


def models_dir() -> Path:
    """Folder with model checkpoints."""
    return Path(os.environ.get("TRITON_OMNI_MODELS") or home() / "models")


def run_dir(server_pid: int) -> Path:
    """The private folder of the server with this pid; made if missing, refused if it is not ours alone."""
    given = os.environ.get("TRITON_OMNI_RUN_DIR")
    path = Path(given) if given else Path(tempfile.gettempdir()) / f"triton-omni-{os.getuid()}" / run_name(server_pid)
    if not given:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_private(path.parent)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(path)
    return path


def run_name(pid: int) -> str:
    """Name of a server's run folder: its pid and start time, so that a reused pid is another server."""
    return f"{pid}-{start_time(pid)}"


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot (field 22 of /proc/<pid>/stat); 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def _check_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} must be a directory of this user with mode 0700")
