# SPDX-License-Identifier: Apache-2.0
"""Where things are on this machine, and the only file that reads our environment variables for it.

TRITON_OMNI_HOME           set-up's folder; default: `.runtime` in a writable checkout, else the user's cache
TRITON_OMNI_ENGINE_PYTHON  interpreter of the engine workers; default: the home's engine environment
TRITON_OMNI_MODELS         folder relative model names are resolved in; default: the home's models
TRITON_OMNI_RUN_DIR        private folder of one server's sockets and records; default: derived from the server

Standard library only: set-up runs before anything is installed.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HOME_VARIABLE = "TRITON_OMNI_HOME"
ENGINE_PYTHON_VARIABLE = "TRITON_OMNI_ENGINE_PYTHON"
MODELS_VARIABLE = "TRITON_OMNI_MODELS"
RUN_DIR_VARIABLE = "TRITON_OMNI_RUN_DIR"


def is_checkout(folder: Path = REPO) -> bool:
    """True for a checkout of the repository, False for an installed wheel."""
    return (folder / "pyproject.toml").is_file()


def absolute(given: str | Path) -> Path:
    """A path that still leads there from another folder: what we start does not run in ours."""
    return Path(given).expanduser().absolute()


def home(repo: Path = REPO) -> Path:
    """Set-up's folder."""
    given = os.environ.get(HOME_VARIABLE)
    if given:
        return Path(given).expanduser().resolve()
    if is_checkout(repo) and os.access(repo, os.W_OK):
        return repo / ".runtime"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "triton-omni"


def engine_python() -> Path:
    """The interpreter that runs engine workers: ours if it was set up, else the one that runs now."""
    given = os.environ.get(ENGINE_PYTHON_VARIABLE)
    if given:
        return absolute(given)
    ours = home() / "engine" / "bin" / "python"
    return ours if ours.exists() else Path(sys.executable)


def models_dir() -> Path:
    """Folder with model checkpoints."""
    return absolute(os.environ.get(MODELS_VARIABLE) or home() / "models")


def run_dir(server_pid: int) -> Path:
    """The private folder of the server with this pid; made if missing, refused if it is not ours alone."""
    given = os.environ.get(RUN_DIR_VARIABLE)
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
    """When a process started, in clock ticks since boot; with the pid it is unique. 0 for a dead one or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    # the second field is the program's name in brackets and may hold anything
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def _check_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} must be a directory of this user with mode 0700")
