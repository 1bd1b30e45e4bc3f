# SPDX-License-Identifier: Apache-2.0
"""Folders of this machine: whose they are, and who may read them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from triton_omni.backends.config import paths

VARIABLES = ("TRITON_OMNI_HOME", "TRITON_OMNI_ENGINE_PYTHON", "TRITON_OMNI_MODELS", "TRITON_OMNI_RUN_DIR")


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_run_folder_is_private_and_the_servers_own(tmp_path):
    path = paths.run_dir(os.getpid())
    assert path == paths.run_dir(os.getpid())
    assert path.stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.is_relative_to(tmp_path)
    assert path.name == f"{os.getpid()}-{paths.start_time(os.getpid())}"
    assert paths.run_dir(1) != path


def test_a_stopped_process_differs_from_a_running_and_a_dead_one():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not paths.is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert paths.is_stopped(child.pid)
        child.kill()
    assert not paths.is_stopped(child.pid) and not paths.is_stopped(0)


def test_a_given_run_folder_is_used_if_it_is_private(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_OMNI_RUN_DIR", str(tmp_path / "deep" / "run"))
    assert paths.run_dir(1) == tmp_path / "deep" / "run"
    (tmp_path / "deep" / "run").chmod(0o755)
    with pytest.raises(PermissionError, match="0700"):
        paths.run_dir(1)


def test_a_folder_that_somebody_prepared_is_refused(tmp_path):
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (tmp_path / f"triton-omni-{os.getuid()}").symlink_to(other)
    with pytest.raises(PermissionError):
        paths.run_dir(os.getpid())


def test_start_times_tell_processes_apart():
    assert paths.start_time(os.getpid()) > 0
    assert paths.start_time(2**22 + 1) == 0


def test_home_and_what_lies_in_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert paths.home(tmp_path) == Path("/c/triton-omni"), "an installed wheel"
    (tmp_path / "pyproject.toml").touch()
    assert paths.home(tmp_path) == tmp_path / ".runtime", "a checkout"
    monkeypatch.setenv("TRITON_OMNI_HOME", str(tmp_path))
    assert paths.home() == tmp_path
    assert paths.models_dir() == tmp_path / "models"
    assert paths.engine_python() == Path(sys.executable), "nothing is set up there"
    ours = tmp_path / "engine" / "bin" / "python"
    ours.parent.mkdir(parents=True)
    ours.touch()
    assert paths.engine_python() == ours
    monkeypatch.setenv("TRITON_OMNI_MODELS", "/m")
    monkeypatch.setenv("TRITON_OMNI_ENGINE_PYTHON", "/p")
    assert paths.models_dir() == Path("/m")
    assert paths.engine_python() == Path("/p")
