# SPDX-License-Identifier: Apache-2.0
"""Processes by pid and start time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from triton_omni.backends.supervisor.serve import processes

STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
POLITE = "import time; print(1, flush=True); time.sleep(600)"


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        child.kill()
        child.communicate()


def run(children: list[subprocess.Popen[bytes]], code: str, **environment: str) -> subprocess.Popen[bytes]:
    """A child that is up (its first byte has come)."""
    command = [sys.executable, "-c", code]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment})
    children.append(child)
    assert child.stdout is not None
    assert child.stdout.read(1) == b"1"
    return child


def test_start_time_tells_the_living_from_zombies_and_strangers(children: list[subprocess.Popen[bytes]]) -> None:
    child = run(children, POLITE)
    started = processes.start_time(child.pid)
    assert processes.is_alive(child.pid, started)
    assert not processes.is_alive(child.pid, started + 1)
    child.kill()
    assert processes.wait_until(lambda: processes.start_time(child.pid) == 0, 10)  # a zombie until waited for
    assert child.poll() is not None
    assert not processes.is_alive(child.pid, 0)


def test_end_all_kills_only_who_does_not_go(children: list[subprocess.Popen[bytes]]) -> None:
    polite, stubborn = run(children, POLITE), run(children, STUBBORN)
    assert processes.end_all([polite.pid, stubborn.pid, 2**22 + 1], 0.5) == [stubborn.pid]


def test_marked_finds_by_the_whole_word(children: list[subprocess.Popen[bytes]]) -> None:
    ours = run(children, POLITE, OMNI_TEST_MARK="abc")
    run(children, POLITE, OMNI_TEST_MARK="abcd")
    assert processes.marked("OMNI_TEST_MARK=abc") == [ours.pid]


def test_stop_says_whether_a_child_went_by_itself() -> None:
    with open(os.devnull, "wb") as sink:
        command = [sys.executable, "-c", POLITE]
        child = processes.start(command, dict(os.environ), sink.fileno(), "/")
        assert os.getsid(child.pid) == child.pid
        assert processes.stop(child, 20)
    assert processes.stop(child, 0)  # a second time does no harm
