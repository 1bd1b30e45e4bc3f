# SPDX-License-Identifier: Apache-2.0
"""The worker as a process: start, refusal in words, death and back-off, end with its stub."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from pathlib import Path

import pytest

from tests.kit.connector_contract import open_fds
from tests.kit.worker_harness import chat
from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.hub import Hub, Lost, probe
from triton_omni.backends.core.generate import encode_request
from triton_omni.backends.stub.worker_process import (
    FIRST_PAUSE_S,
    GIVE_UP_AFTER,
    LONGEST_PAUSE_S,
    STEADY_S,
    Backoff,
    Command,
    WorkerProcess,
    inherited_environment,
)

TIMEOUT_S = 30.0


def test_pauses_grow_up_to_a_bound_and_then_it_gives_up():
    backoff = Backoff()
    pauses = [backoff.died(1.0) for _ in range(GIVE_UP_AFTER)]  # after so many deaths in a row it gives up
    assert pauses[:2] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
    assert pauses[-2] <= LONGEST_PAUSE_S
    assert pauses[-1] is None
    assert all(a < b or b == LONGEST_PAUSE_S for a, b in itertools.pairwise(pauses[:-1]))


def test_a_long_life_resets_the_back_off():
    backoff = Backoff()
    for _ in range(GIVE_UP_AFTER):
        backoff.died(1.0)
    assert backoff.died(STEADY_S) == FIRST_PAUSE_S
    assert backoff.died(1.0) == 2 * FIRST_PAUSE_S


@contextlib.contextmanager
def worker(address, *extra, stage="tokens"):
    arguments = ("--address", str(address), "--pipeline", "toy", "--stage", stage, *extra)
    worker_process, hub = WorkerProcess(Command(Path(sys.executable), arguments, {"OMP_NUM_THREADS": "1"})), Hub("stub")
    peer = hub.adopt(worker_process.start(time.monotonic()))
    try:
        yield worker_process, hub, peer
    finally:
        hub.close()
        worker_process.kill()


def wait_for(hub, kind):
    """The next item of a kind, and everything before it."""
    seen, deadline = [], time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for _, item in hub.poll(1.0):
            seen.append(item)
            if isinstance(item, kind):
                return item
    raise AssertionError(f"no {kind.__name__}; seen: {seen}")


def test_a_worker_process_lives_serves_and_ends_with_its_stub(tmp_path):
    fds = open_fds()
    with worker(tmp_path / "w.sock") as (worker_process, hub, peer):
        ready = wait_for(hub, msg.PingMessage)
        assert (ready.name, ready.state) == ("toy/tokens", "ready")
        assert probe(str(tmp_path / "w.sock"), TIMEOUT_S).state == "ready"
        peer.send(msg.OpenMessage(b"r" * 16, "req", encode_request(chat(2)), wanted=("text",)))
        assert wait_for(hub, msg.FinishedMessage).reason == "length"
        process = worker_process.process
        peer.connector.close()
        assert process.wait(TIMEOUT_S) == 0
    assert open_fds() == fds


def test_a_worker_that_cannot_load_says_why(tmp_path):
    with worker(tmp_path / "w.sock", stage="nonsense") as (worker_process, hub, _):
        failed = wait_for(hub, msg.PingMessage)
        assert failed.state == "failed"
        assert "StopIteration" in failed.text or "nonsense" in failed.text
        assert worker_process.process.wait(TIMEOUT_S) == 1


def test_a_killed_worker_is_started_again_when_it_is_time(tmp_path):
    with worker(tmp_path / "w.sock") as (worker_process, hub, _):
        wait_for(hub, msg.PingMessage)
        worker_process.process.kill()
        wait_for(hub, Lost)
        now = time.monotonic()
        worker_process.died(now)
        assert worker_process.state == "restarting"
        assert worker_process.restarts == 1
        assert worker_process.pid == 0
        assert not worker_process.due(now)
        assert worker_process.due(now + FIRST_PAUSE_S)
        hub.adopt(worker_process.start(now))
        assert not worker_process.due(now + 100)
        assert wait_for(hub, msg.PingMessage).state == "ready"
        assert worker_process.pid > 0
        worker_process.stop()
        assert worker_process.pid == 0
        worker_process.stop()
        wait_for(hub, Lost)


def test_worker_process_gives_up(tmp_path):
    worker_process = WorkerProcess(Command(Path(sys.executable), ()))
    for _ in range(GIVE_UP_AFTER + 1):
        worker_process.died(0.0)
    assert worker_process.state == "gave_up"
    assert not worker_process.due(1e9)
    worker_process.kill()


def test_the_stubs_path_settings_do_not_reach_the_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    seen = tmp_path / "seen"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nenv > {seen}.part\nmv {seen}.part {seen}\n", encoding="utf-8")
    fake.chmod(0o755)
    worker_process = WorkerProcess(Command(fake, (), {"OURS": "1"}))
    with worker_process.start(0.0):
        assert worker_process.process.wait(TIMEOUT_S) == 0
    text = seen.read_text(encoding="utf-8")
    assert "PYTHONPATH" not in text
    assert "LD_LIBRARY_PATH" not in text
    assert "OURS=1" in text
    assert worker_process.process.args[0] == str(fake)
    worker_process.kill()


def test_the_drivers_folder_on_the_library_path_reaches_the_worker(tmp_path, monkeypatch):
    (tmp_path / "libcuda.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}:")
    assert inherited_environment()["LD_LIBRARY_PATH"] == str(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    assert "LD_LIBRARY_PATH" not in inherited_environment()


@pytest.mark.parametrize("name", ["", "No", "../toy", "toy.engines", "chat-1"])
def test_pipelines_are_found_by_plain_names_only(name):
    from triton_omni.backends.pipelines import load

    with pytest.raises(LookupError):
        load(name)
