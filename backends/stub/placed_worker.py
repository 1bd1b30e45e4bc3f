# SPDX-License-Identifier: Apache-2.0
"""Workers that a placer starts somewhere in a cluster (scale/placer.py); they join like those started by hand."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from triton_omni.backends.config.schema import PlaceDeploy
from triton_omni.backends.control.hub import Hub, Peer
from triton_omni.backends.stub.external_worker import ExternalWorker
from triton_omni.backends.stub.worker_process import Backoff, inherited_environment

log = logging.getLogger("triton_omni.stub")

RESTART_PAUSE_S = 5.0  # before a placer that has ended is started again
STOP_S = 5.0


class Placer:
    """The placer process of one stub. Started on first use, and again when it has ended; used by the loop's thread."""

    def __init__(self, hub: Hub, command: Sequence[str]) -> None:
        self._hub = hub
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._workers: dict[str, PlacedWorker] = {}
        self._start_again_s = 0.0

    def place(self, name: str, worker: PlacedWorker, order: Mapping[str, object]) -> bool:
        """Ask for a worker called `name`; False if there is no placer now."""
        self._workers[name] = worker
        return self._send({"do": "place", "id": name} | dict(order))

    def kill(self, name: str) -> None:
        """End a worker that was asked for."""
        if self._workers.pop(name, None) is not None:
            self._send({"do": "kill", "id": name})

    def stop(self) -> None:
        """End the placer, once it has taken its orders."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended already
                process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _send(self, order: Mapping[str, object]) -> bool:
        if self._process is None and time.monotonic() < self._start_again_s:
            return False
        try:
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
        except OSError as error:  # it has ended, which its reader reports; or it cannot be started
            log.error("the placer took no order: %s", error)
            self._start_again_s = time.monotonic() + RESTART_PAUSE_S
            return False
        return True

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd="/",
            env=inherited_environment(),
        )  # fmt: skip
        for watch in (self._read, self._wait):  # not by the end of its output, which a child of it may hold open
            threading.Thread(target=watch, args=(process,), name="placer", daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # what is no JSON is a library's print
                    self._hub.post(partial(self._on_message, json.loads(line)))

    def _wait(self, process: subprocess.Popen[str]) -> None:
        code = process.wait()
        self._hub.post(partial(self._on_end, process, code))

    def _on_message(self, message: dict[str, Any]) -> None:
        worker = self._workers.get(message.get("id", ""))
        if worker is not None:
            worker.on_placer(message)

    def _on_end(self, process: subprocess.Popen[str], code: int) -> None:
        """Placed workers go on; others are asked for again."""
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # an order was left in it
            process.stdin.close()
        if self._process is process:
            log.error("the placer has ended with code %d", code)
            self._process, self._start_again_s = None, time.monotonic() + RESTART_PAUSE_S
            for worker in self._workers.values():
                worker.on_placer_end(self._start_again_s)


class PlacedWorker(ExternalWorker):
    """One worker of a stage that a placer starts, and starts again after a death, with back-off."""

    def __init__(
        self,
        hub: Hub,
        placer: Placer,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        place: PlaceDeploy,
    ) -> None:
        super().__init__(hub, "")
        self._where = ""
        self._placer = placer
        self._base = name
        self._argv = list(argv)
        self._environment = dict(environment)
        self._place = place
        self._backoff = Backoff()
        self._name = ""
        self._starts = 0
        self._retry_s: float | None = None

    @property
    def placement(self) -> str:
        return self._where

    def start(self, now_s: float) -> None:
        """Ask the placer for the worker."""
        self._starts += 1
        self._name = f"{self._base}/{self._starts}"
        order = {
            "argv": [*self._argv, "--name", self._name], "environment": self._environment, "cpus": self._place.cpus,
            "gpus": self._place.gpus, "resources": self._place.resources,
        }  # fmt: skip
        placed = self._placer.place(self._name, self, order)
        self.state, self.started_s, self.ready_s = "waiting", now_s, None
        self._where = "asked for" if placed else "there is no placer now"
        self._retry_s = now_s + (self._place.wait_s if placed else RESTART_PAUSE_S)

    def join(self, peer: Peer, name: str, now_s: float) -> str:
        if name != self._name:
            return f"it is not the worker that was placed ('{self._name}')"
        refusal = super().join(peer, name, now_s)
        if not refusal:
            self._retry_s = None
        return refusal

    def on_placer(self, message: Mapping[str, Any]) -> None:
        """What the placer says of this worker."""
        kind = message["is"]
        if kind == "pending" and message["why"] != self._where:
            self._where = message["why"]
            log.warning("worker %s waits for a place: %s", self._name, self._where)
        elif kind == "placed":
            self._where = f"on node {message['node'][:8]} at {message['address']}"
            log.info("worker %s is placed %s", self._name, self._where)
        elif kind == "dead" and self._peer is None and self._retry_s is not None:
            log.warning("worker %s was not started: %s", self._name, message["why"])
            self.died(time.monotonic())

    def on_placer_end(self, again_s: float) -> None:
        """The placer has ended: if the worker has not joined by `again_s`, it is asked for again."""
        if self._peer is None and self.state == "waiting":
            self._where, self._retry_s = "the placer has ended", again_s

    def died(self, now_s: float) -> None:
        """Record the worker's death and schedule the next one."""
        pause = self._backoff.died(0.0 if self.ready_s is None else now_s - self.ready_s)
        self.kill()
        self.gpu_paths, self.state, self.ready_s = "", "restarting", None
        self.restarts += 1
        self._retry_s = None if pause is None else now_s + pause
        if pause is None:
            self.state = "gave_up"

    def due(self, now_s: float) -> bool:
        """True if it is time to ask for the worker again."""
        if self._peer is not None or self._retry_s is None or now_s < self._retry_s:
            return False
        if self.state == "waiting":
            log.error("worker %s has not joined: %s", self._name, self._where)
            self.kill()
        return True

    def kill(self) -> None:
        """Close the link, and let the placer end the worker."""
        super().kill()
        self._placer.kill(self._name)

    terminate = kill

    def stop(self) -> None:
        self.kill()
        self._placer.stop()
