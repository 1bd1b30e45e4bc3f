# SPDX-License-Identifier: Apache-2.0
"""The supervisor's interpreter: the engine environment's, which must hold the code that was started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from triton_omni.backends.config import paths
from triton_omni.backends.config.paths import ENGINE_PYTHON_VARIABLE, HOME_VARIABLE
from triton_omni.backends.supervisor.errors import SetupError
from triton_omni.backends.supervisor.interpreter import check_same_code, source_digest

TIMEOUT_S = 60.0
BOOTSTRAP = "backends/supervisor/bootstrap.py"


def interpreter_script(folder: Path, *lines: str) -> Path:
    """An engine Python that is a shell script around the running one."""
    script = folder / "bin" / "python"
    script.parent.mkdir(parents=True)
    script.write_text("\n".join(["#!/bin/sh", *lines, f'exec {sys.executable} "$@"', ""]))
    script.chmod(0o700)
    return script


def doctor(python: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    arguments = [python, *command, "doctor", "--health"]
    environment = {**os.environ, **variables}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def second_checkout(folder: Path) -> Path:
    """A copy of this checkout that differs in one file."""
    for name in ("backends", "client"):
        shutil.copytree(paths.REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "pipelines"))
    shutil.copy(paths.REPO / "pyproject.toml", folder)
    (folder / "backends" / "wire.py").write_text("CHANGED = True\n")
    return folder


def test_an_engine_python_that_is_a_script_is_started_once(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    script = interpreter_script(tmp_path, f'case "$1" in -X) echo start >> {starts};; esac')
    finished = doctor(sys.executable, "-m", "triton_omni.cli", **{ENGINE_PYTHON_VARIABLE: str(script)})
    assert "server" in finished.stdout, finished.stderr
    assert starts.read_text().split() == ["start"]


def test_any_python_starts_a_command_of_a_checkout(tmp_path: Path) -> None:
    """Without site-packages the starting Python has only the standard library."""
    script = interpreter_script(tmp_path)
    start = [sys.executable, "-I", "-S", str(paths.REPO / BOOTSTRAP), "cli"]
    finished = doctor(start[0], *start[1:], **{ENGINE_PYTHON_VARIABLE: str(script)})
    assert "server" in finished.stdout and not finished.stderr


def test_a_second_checkout_with_the_home_of_the_first_is_refused(tmp_path: Path) -> None:
    """It ran the first checkout's code without saying so."""
    checkout = second_checkout(tmp_path / "second")
    home = {HOME_VARIABLE: str(paths.home()), ENGINE_PYTHON_VARIABLE: ""}
    finished = doctor(sys.executable, str(checkout / BOOTSTRAP), "cli", **home)
    assert finished.returncode == 1
    assert f"runs the code of {paths.BACKENDS}, not of {checkout}/backends" in finished.stdout
    assert "TRITON_OMNI_HOME" in finished.stdout


def test_a_copy_of_the_same_code_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed wheel and a container have copies."""
    for name in ("backends", "client"):
        shutil.copytree(paths.REPO / name, tmp_path / name)
    monkeypatch.setattr("triton_omni.backends.supervisor.interpreter.imported_folders", lambda *_: folders)
    folders = [tmp_path / "client", tmp_path / "backends"]
    check_same_code(Path(sys.executable), "engine environment")
    (tmp_path / "client" / "cli.py").write_text("")
    with pytest.raises(SetupError, match="runs the code of"):
        check_same_code(Path(sys.executable), "engine environment")


def test_the_digest_is_the_same_for_a_checkout_and_a_wheel(tmp_path: Path) -> None:
    shutil.copytree(paths.REPO / "client", tmp_path / "triton_omni")
    shutil.copytree(paths.BACKENDS, tmp_path / "triton_omni" / "backends")
    wheel = (tmp_path / "triton_omni", tmp_path / "triton_omni" / "backends")
    assert source_digest(*wheel) == source_digest(paths.REPO / "client", paths.BACKENDS)


def test_an_environment_without_the_package_is_refused(tmp_path: Path) -> None:
    bare = interpreter_script(tmp_path)
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    with pytest.raises(SetupError, match="not installed in the engine environment"):
        check_same_code(bare, "engine environment")
