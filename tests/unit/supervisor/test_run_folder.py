# SPDX-License-Identifier: Apache-2.0
"""Run folders: private, and swept only when their owner is dead."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from triton_omni.backends.supervisor.serve import processes, run_folder


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary and shared-memory folders of this test alone."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(run_folder, "SHM", tmp_path / "shm")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(run_folder, "_SOCKET_PATH_CHARS", 1000)


def said(text: str) -> None:
    """Take a line of progress."""


def make_dead() -> run_folder.RunDir:
    """A run folder whose owner has ended."""
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    run_dir = replace(run_folder.make(), owner_pid=int(child.stdout), owner_start_time=1)
    run_folder.write_json(run_dir.path / run_folder.OWNER_FILE, {**asdict(run_dir), "path": str(run_dir.path)})
    return run_dir


def test_a_run_dir_is_private_and_owned() -> None:
    first, second = run_folder.make(), run_folder.make()
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    assert first.owner_pid == os.getpid() and first.owner_start_time == processes.start_time(os.getpid())
    assert first.path != second.path and first.shm_prefix != second.shm_prefix
    assert list(run_folder.all_runs()) == sorted([first, second], key=lambda r: r.path)


def test_a_living_owner_keeps_everything() -> None:
    run_dir = run_folder.make()
    (run_folder.SHM / f"{run_dir.shm_prefix}region").touch()
    assert run_folder.sweep(said) == []
    assert run_dir.path.is_dir() and len(run_dir.regions()) == 1


def test_a_dead_owner_is_swept_with_its_regions_and_nobody_elses() -> None:
    living, dead = run_folder.make(), make_dead()
    for prefix in (living.shm_prefix, dead.shm_prefix, "other_"):
        (run_folder.SHM / f"{prefix}region").touch()
    assert run_folder.sweep(said) == [dead.path]
    assert sorted(p.name for p in run_folder.SHM.iterdir()) == sorted([f"{living.shm_prefix}region", "other_region"])
    assert living.path.is_dir() and not dead.path.exists()


def test_processes_of_a_dead_owner_are_ended() -> None:
    dead = make_dead()
    sleeper = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    environment = {**os.environ, "TRITON_OMNI_RUN_DIR": str(dead.path)}
    with subprocess.Popen(sleeper, env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        assert processes.marked(dead.mark) == [child.pid]
        run_folder.sweep(said)
        assert child.wait(10) != 0


def test_openmp_names_of_killed_processes_are_removed() -> None:
    dead, uid = make_dead(), os.getuid()
    names = [f"__KMP_REGISTERED_LIB_{pid}_{uid}" for pid in (dead.owner_pid, os.getpid(), dead.owner_pid + 1)]
    for name in names:
        (run_folder.SHM / name).touch()
    dead.remove(known=[dead.owner_pid, os.getpid()])
    assert sorted(p.name for p in run_folder.SHM.iterdir()) == sorted(names[1:])


def test_a_folder_that_others_may_enter_is_not_touched(tmp_path: Path) -> None:
    dead = make_dead()
    dead.path.chmod(0o755)
    (tmp_path / f"{run_folder.PREFIX}link").symlink_to(tmp_path / "shm")
    assert run_folder.sweep(said) == [] and dead.path.exists()


def test_folders_of_dead_servers_started_by_hand_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / f"triton-omni-{os.getuid()}"
    living, dead = folder / f"{os.getpid()}-{processes.start_time(os.getpid())}", folder / f"{os.getpid()}-1"
    for path in (living, dead, folder / "keep-this"):
        path.mkdir(parents=True)
    assert run_folder.sweep(said) == [dead]
    assert sorted(p.name for p in folder.iterdir()) == sorted([living.name, "keep-this"])
