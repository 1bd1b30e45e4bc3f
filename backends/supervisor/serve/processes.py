# SPDX-License-Identifier: Apache-2.0
"""Processes as /proc shows them: which are alive, which are ours, and how to end them. Always by pid."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from triton_omni.backends.child_process import signal_on_parent_death
from triton_omni.backends.config.paths import start_time

PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
LEFTOVER_PATIENCE_S = 3.0


def is_alive(pid: int, started: int) -> bool:
    """True if exactly this process still runs."""
    return started != 0 and start_time(pid) == started


def marked(mark: str) -> list[int]:
    """Pids of this user's processes whose first environment holds `mark` (NAME=value with a random value)."""
    wanted = mark.encode()
    found: list[int] = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            # the file is as long as its owner's environment; a process of another user is not readable
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def mapped(pids: Iterable[int]) -> str:
    """The memory maps of processes, as one text; of those that we may read."""
    texts: list[str] = []
    for pid in pids:
        with contextlib.suppress(OSError):
            texts.append((PROC / str(pid) / "maps").read_text(errors="replace"))
    return "".join(texts)


def started_at(pid: int) -> float:
    """When a process started, in seconds since the epoch; 0 for one that is dead."""
    boot = next(line for line in (PROC / "stat").read_text().splitlines() if line.startswith("btime "))
    ticks = start_time(pid)
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def end_all(pids: Iterable[int], patience_s: float) -> list[int]:
    """SIGTERM, wait at most `patience_s`, SIGKILL. Returns those that had to be killed."""
    left = {pid: started for pid in pids if (started := start_time(pid))}
    for pid, started in left.items():
        send(pid, started, signal.SIGTERM)
    wait_until(lambda: not any(is_alive(p, s) for p, s in left.items()), patience_s)
    killed = [pid for pid, started in left.items() if send(pid, started, signal.SIGKILL)]
    wait_until(lambda: not any(is_alive(p, left[p]) for p in killed), patience_s)
    return killed


def send(pid: int, started: int, number: int) -> bool:
    """Send a signal if this process still runs. True if it was sent."""
    if not is_alive(pid, started):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll a condition that has no event, such as another process's end. False after the time-out."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        reap_strangers()
        time.sleep(_POLL_S)
    return True


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent died, so that they can be reaped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


_OWN_CHILDREN: set[int] = set()


def reap_strangers() -> None:
    """Collect adopted children that have ended; those we started ourselves are left to their Popen objects."""
    try:
        children = (PROC / "self" / "task" / str(os.getpid()) / "children").read_text().split()
    except OSError:
        return
    for pid in map(int, children):
        if pid not in _OWN_CHILDREN:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def start(command: list[str], environment: dict[str, str], output: int, folder: str) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own (a Ctrl-C is ours to handle) that gets SIGTERM if we are killed."""
    child = subprocess.Popen(  # the child is ended by its owner
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=folder,
        start_new_session=True,
        # one system call; called from the main thread, whose death is what it watches
        preexec_fn=partial(signal_on_parent_death, signal.SIGTERM),
    )
    _OWN_CHILDREN.add(child.pid)
    return child


def stop(child: subprocess.Popen[bytes] | subprocess.Popen[str], patience_s: float) -> bool:
    """End a child of ours: SIGTERM, wait, SIGKILL. True if it did not have to be killed."""
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(patience_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return False
    finally:
        _OWN_CHILDREN.discard(child.pid)
    return True
