# SPDX-License-Identifier: Apache-2.0
"""Where things are on this machine, and the only file that reads our environment variables for it.

TRITON_OMNI_HOME           set-up's folder; default: `.runtime` in a writable checkout, else the user's cache
TRITON_OMNI_ENGINE_PYTHON  interpreter of the engine workers; default: the home's engine environment
TRITON_OMNI_MODELS         folder relative model names are resolved in; default: the home's models
TRITON_OMNI_SERVER         folder of another tritonserver (bin/tritonserver, backends/); default: the home's
TRITON_OMNI_RUN_DIR        private folder of one server's sockets and records; default: derived from the server
TRITON_OMNI_LOOPBACK       set by `serve` where Triton listens on loopback only

Standard library only: set-up runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
import tempfile
from pathlib import Path
from typing import Literal

BACKENDS = Path(__file__).resolve().parents[1]
REPO = BACKENDS.parent
Build = Literal["cpu", "cuda"]
"""A build of vLLM and torch; also the platform whose block of a deploy file counts."""
HOME_VARIABLE = "TRITON_OMNI_HOME"
ENGINE_PYTHON_VARIABLE = "TRITON_OMNI_ENGINE_PYTHON"
MODELS_VARIABLE = "TRITON_OMNI_MODELS"
SERVER_VARIABLE = "TRITON_OMNI_SERVER"
RUN_DIR_VARIABLE = "TRITON_OMNI_RUN_DIR"
LOOPBACK_VARIABLE = "TRITON_OMNI_LOOPBACK"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
DRIVER_LIBRARY = "libcuda.so.1"


def is_checkout(folder: Path = REPO) -> bool:
    """True for a checkout of the repository, False for an installed wheel."""
    return (folder / "pyproject.toml").is_file()


def absolute(given: str | Path) -> Path:
    """An absolute path: child processes run in other folders."""
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
    """The interpreter of engine workers: the home's if it was set up, else the running one."""
    given = os.environ.get(ENGINE_PYTHON_VARIABLE)
    if given:
        return absolute(given)
    ours = home() / "engine" / "bin" / "python"
    return ours if ours.exists() else Path(sys.executable)


def build_of(environment: Path) -> Build:
    """Which vLLM a virtual environment holds; "cpu" where there is none."""
    return "cuda" if any(environment.glob("lib/python*/site-packages/vllm-*.dist-info")) else "cpu"


def engine_build() -> Build:
    """The build of the environment that runs engine workers."""
    return build_of(engine_python().parent.parent)


def models_dir() -> Path:
    """Folder with model checkpoints."""
    return absolute(os.environ.get(MODELS_VARIABLE) or home() / "models")


def driver_library_path(library_path: str) -> str:
    """The entries of an LD_LIBRARY_PATH that hold NVIDIA's driver; "" if there is none.

    Some hosts (GKE: /usr/local/nvidia/lib64) have it on that variable only. All other entries are dropped for
    processes of another environment, whose libraries they could replace.
    """
    folders = [folder for folder in library_path.split(":") if folder and (Path(folder) / DRIVER_LIBRARY).exists()]
    return ":".join(folders)


def run_dir(server_pid: int) -> Path:
    """The private folder of the server with this pid, created if missing; PermissionError if others have access."""
    given = os.environ.get(RUN_DIR_VARIABLE)
    path = Path(given) if given else Path(tempfile.gettempdir()) / f"triton-omni-{os.getuid()}" / run_name(server_pid)
    if not given:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_private(path.parent)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(path)
    return path


def operator_key(run_dir: Path) -> str:
    """The operator's key of the server with this run folder, for what not every client may do; made if missing."""
    file, draft = run_dir / "key", run_dir / f".key-{os.getpid()}"
    if not file.exists():
        draft.write_text(secrets.token_hex(16))
        with contextlib.suppress(FileExistsError):
            file.hardlink_to(draft)
        draft.unlink()
    return file.read_text().strip()


def run_name(pid: int) -> str:
    """Name of a server's run folder: its pid and start time, so that a reused pid is another server."""
    return f"{pid}-{start_time(pid)}"


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; with the pid it is unique. 0 for a dead one or a zombie."""
    fields = _status_fields(pid)
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_stopped(pid: int) -> bool:
    """True for a process that a signal (SIGSTOP) has stopped; one that a debugger holds does not count."""
    return pid > 0 and _status_fields(pid)[0] == "T"


def _status_fields(pid: int) -> list[str]:
    """/proc's fields of a process from its state on; state X if it is dead."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ["X"]
    # the second field is the program's name in brackets and may hold anything
    return text.rpartition(")")[2].split()


def _check_private(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} must be a directory of this user with mode 0700")
