# SPDX-License-Identifier: Apache-2.0
"""Switches to the engine environment's Python, and checks that all environments run the code that was started."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from triton_omni.backends.child_process import clean_environment
from triton_omni.backends.config import paths
from triton_omni.backends.supervisor.errors import SetupError

_STARTED = "triton_omni_engine"  # -X option of the process that use_engine_python became
_CLI = "triton_omni.cli"
_PRINT_FOLDERS = """
import importlib.util
for name in ("triton_omni", "triton_omni.backends"):
    spec = importlib.util.find_spec(name)
    print(next(iter(spec.submodule_search_locations)))
"""
_IMPORT_TIMEOUT_S = 60


def use_engine_python(arguments: Sequence[str]) -> None:
    """Continue `triton-omni ARGUMENTS` in the engine environment, which has the packages of a supervisor.

    Returns where that is running already, and for an installed package without an engine environment. Raises
    SetupError where set-up has not run, or the environment holds other code than ours.
    """
    engine = paths.engine_python()
    if paths.is_checkout() and not (os.environ.get(paths.ENGINE_PYTHON_VARIABLE) or _is_under(engine, paths.home())):
        raise SetupError(f"no engine environment in {paths.home()}", hint="make setup")
    if not engine.exists():
        raise SetupError(f"no engine environment: {engine} does not exist", hint="make setup")
    if _STARTED in sys._xoptions:  # the interpreter may be a script, so its path tells nothing
        return
    check_same_code(engine, "engine environment")
    if not engine.parent.parent.samefile(sys.prefix):
        os.execv(engine, [str(engine), "-X", _STARTED, "-m", _CLI, *arguments])


def _is_under(path: Path, folder: Path) -> bool:
    return folder in path.parents


def check_same_code(python: Path, environment: str) -> None:
    """Raises SetupError if `python` imports another version of Triton-Omni than the running one."""
    ours = [Path(next(iter(sys.modules["triton_omni"].__path__))), paths.BACKENDS]
    theirs = imported_folders(python, environment)
    if theirs != ours and source_digest(*theirs) != source_digest(*ours):
        raise SetupError(
            f"the {environment} ({python}) runs the code of {theirs[1]}, not of {paths.BACKENDS}",
            hint="run make setup in the checkout to serve; two checkouts in use need a TRITON_OMNI_HOME each",
        )


def imported_folders(python: Path, environment: str) -> list[Path]:
    """The folders that `python` imports as triton_omni and triton_omni.backends. Raises SetupError if it has none."""
    command = [str(python), "-c", _PRINT_FOLDERS]
    child = subprocess.run(
        command, env=clean_environment(os.environ), cwd="/", capture_output=True, text=True, check=False,
        timeout=_IMPORT_TIMEOUT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if child.returncode != 0:
        raise SetupError(f"Triton-Omni is not installed in the {environment} ({python})", hint="make setup")
    return [Path(line) for line in child.stdout.splitlines()]


def source_digest(client: Path, backends: Path) -> str:
    """SHA-256 of all Python files of a package, wherever it is installed."""
    state = hashlib.sha256()
    for folder in (client, backends):
        for file in sorted(folder.rglob("*.py")):
            name = file.relative_to(folder)
            if folder == client and name.parts[0] == "backends":
                continue
            state.update(f"{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return state.hexdigest()
