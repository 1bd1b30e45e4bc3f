# SPDX-License-Identifier: Apache-2.0
"""How long a stop waits for the server: while an instance has requests, but not for streams that have none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from triton_omni.backends.control import Hub
from triton_omni.backends.control.messages import PingMessage
from triton_omni.backends.control.records import InstanceRecord, touch_record, write_record
from triton_omni.backends.supervisor.serve import supervise
from triton_omni.backends.supervisor.serve.launch import Launch, Ports
from triton_omni.backends.supervisor.serve.locate import Server
from triton_omni.backends.supervisor.serve.processes import start_time, wait_until
from triton_omni.backends.supervisor.serve.run_folder import RunDir
from triton_omni.backends.supervisor.serve.supervise import Plan, Supervisor
from triton_omni.backends.supervisor.serve.watch import Bounds, Watch

SOON_S = 20.0


class Pipeline:
    """An orchestrator's record and the socket behind it, which answers probes."""

    def __init__(self, folder: Path) -> None:
        self.live = 1
        self.answered = threading.Semaphore(0)
        self._folder = folder
        self._hub = Hub("chat/", folder / "chat.sock")
        self._end = threading.Event()
        record = InstanceRecord(
            model="chat", instance="0_0", role="orchestrator", pid=os.getpid(), start_time=start_time(os.getpid()),
            state="ready", address=self._hub.address,
        )  # fmt: skip
        write_record(folder, record)
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while not self._end.is_set():
            for peer, item in self._hub.poll(0.05):
                if peer is not None and isinstance(item, PingMessage):
                    peer.send(PingMessage("chat/", "ready", self.live))
                    self.answered.release()
            touch_record(self._folder, "chat", "0_0")

    def close(self) -> None:
        self._end.set()
        self._thread.join(SOON_S)
        self._hub.close()


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path)
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A server that does not end by itself."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def stop_is_over(folder: Path, server: subprocess.Popen[bytes]) -> Callable[[], bool]:
    run_dir = RunDir(folder, "omni_", os.getpid(), start_time(os.getpid()))
    launch = Launch(Server(Path("/t"), Path("/b"), {}, Path("/p"), False), [], Ports(), run_dir)
    plan = Plan(launch, Watch(Bounds()), folder / "server.log", folder / "proxy.log")
    return Supervisor(plan, lambda _: None)._stop_is_over(server)


def test_a_server_without_requests_is_not_waited_for(
    tmp_path: Path, pipeline: Pipeline, server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop after slow readers took the whole exit time-out, 23 s: their streams held up the unload."""
    monkeypatch.setattr(supervise, "IDLE_STOP_S", 0.3)
    is_over = stop_is_over(tmp_path, server)
    asked = 0
    while asked < 8:  # more time than IDLE_STOP_S: each probe is answered
        assert not is_over(), "a request is running"
        asked += pipeline.answered.acquire(timeout=SOON_S)
    pipeline.live = 0
    assert wait_until(is_over, SOON_S)
    assert server.poll() is None


def test_a_server_that_has_ended_is_not_waited_for(tmp_path: Path, server: subprocess.Popen[bytes]) -> None:
    is_over = stop_is_over(tmp_path, server)
    assert not is_over()
    server.kill()
    server.wait(SOON_S)
    assert is_over()
