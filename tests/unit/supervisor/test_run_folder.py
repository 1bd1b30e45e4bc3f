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

from triton_omni.backends.supervisor.command import local_key
from triton_omni.backends.supervisor.serve import processes, run_folder


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary and shared-memory folders of this test alone."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(run_folder, "SHM", tmp_path / "shm")
    monkeypatch.setattr(run_folder, "TMP", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(run_folder, "_SOCKET_PATH_CHARS", 1000)


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(20)
    return child.pid


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


def test_the_key_of_an_own_server_is_found_by_its_port_and_never_sent_elsewhere() -> None:
    run_dir = run_folder.make()
    run_folder.write_json(run_dir.path / run_folder.FACTS_FILE, {"grpc_port": 8001, "key": "secret"})
    assert local_key("127.0.0.1:8001") == local_key("localhost:8001") == "secret"
    assert local_key("127.0.0.1:8002") == local_key("example.org:8001") == ""


def test_a_living_owner_keeps_everything() -> None:
    run_dir = run_folder.make()
    (run_folder.SHM / f"{run_dir.shm_prefix}region").touch()
    assert run_folder.sweep(said) == []
    assert run_dir.path.is_dir() and len(run_dir.regions()) == 1


def test_a_dead_owner_is_swept_with_its_regions_and_no_other() -> None:
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


def test_openmp_names_of_dead_processes_are_removed(dead_pid: int) -> None:
    names = [f"__KMP_REGISTERED_LIB_{pid}_{uid}" for pid, uid in
             ((dead_pid, os.getuid()), (dead_pid, os.getuid() + 1), (os.getpid(), os.getuid()))]  # fmt: skip
    for name in names:
        (run_folder.SHM / name).touch()
    make_dead().remove()
    assert sorted(p.name for p in run_folder.SHM.iterdir()) == sorted(names[1:])


def test_folders_of_dead_python_backends_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed server leaves one in /tmp; it could belong to any server that is older than the folder."""
    monkeypatch.setattr(run_folder, "TMP", tmp_path)
    monkeypatch.setattr(run_folder, "PYTHON_BACKEND", "libpython")  # as if this process had loaded the backend
    before, after, full = (tmp_path / f"python_env_{name}" for name in ("before", "after", "full"))
    for folder in (before, after, full):
        folder.mkdir()
    (full / "model").touch()
    os.utime(before, (0, 0))
    os.utime(full, (0, 0))
    make_dead().remove()
    assert not before.exists() and after.exists() and full.exists()


def test_regions_of_dead_stubs_are_removed_while_the_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_NEW_REGION_S", 30.0)
    run_dir = run_folder.make()
    paths = [run_folder.SHM / f"{run_dir.shm_prefix}{name}" for name in ("mapped", "dead", "new")]
    for path in (*paths, run_folder.SHM / "other_region"):
        path.write_bytes(b"0" * 4096)
        os.utime(path, (0, 0))
    os.utime(paths[2])
    hold = "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(1, flush=True); "
    hold += "time.sleep(600)"
    environment = {**os.environ, "TRITON_OMNI_RUN_DIR": str(run_dir.path)}
    with subprocess.Popen([sys.executable, "-c", hold, str(paths[0])], env=environment, stdout=subprocess.PIPE) as stub:
        assert stub.stdout is not None
        stub.stdout.read(1)
        assert run_dir.remove_dead_regions(server_pid=0) == [paths[1].name]
        assert run_dir.remove_dead_regions(server_pid=stub.pid) == [paths[0].name], (
            "the server's own map does not count"
        )
        stub.kill()
    assert sorted(p.name for p in run_folder.SHM.iterdir()) == sorted([paths[2].name, "other_region"])


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
