# SPDX-License-Identifier: Apache-2.0
"""Starts a stage's engine worker and restarts it after a death, with exponential back-off and a limit."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triton_omni.backends.child_process import clean_environment
from triton_omni.backends.config import paths
from triton_omni.backends.control.hub import Peer
from triton_omni.backends.control.records import State

log = logging.getLogger("triton_omni.stub")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # a worker that served this long was healthy: its death resets the back-off
GIVE_UP_AFTER = 8  # consecutive deaths; further starts would only repeat the same failure
TERMINATE_S = 10.0


@dataclass
class Backoff:
    """Delay before each restart; pure."""

    deaths: int = 0

    def died(self, lived_s: float) -> float | None:
        """Seconds to wait after a death, or None to give up."""
        self.deaths = 1 if lived_s >= STEADY_S else self.deaths + 1
        if self.deaths >= GIVE_UP_AFTER:
            return None
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self.deaths - 1))


@dataclass(frozen=True)
class Command:
    """How to start a worker: interpreter, module arguments, and environment variables to add."""

    python: Path
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def inherited_environment() -> dict[str, str]:
    """The stub's environment without the path settings of its own interpreter and libraries."""
    environment = clean_environment(os.environ)
    environment.pop("LD_PRELOAD", None)
    environment.pop("LD_LIBRARY_PATH", None)
    environment |= {"PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"}
    driver = paths.driver_library_path(os.environ.get("LD_LIBRARY_PATH", ""))
    return environment | {"LD_LIBRARY_PATH": driver} if driver else environment


class WorkerProcess:
    """One worker process. Driven by the stub's loop; all times are passed in (monotonic seconds)."""

    def __init__(self, command: Command) -> None:
        self.state: State = "starting"
        self.restarts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0
        self.ready_s: float | None = None
        self.retry_s = 0.0
        self.gpu_paths = ""
        self.placement = ""
        self._command = command
        self._backoff = Backoff()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    def start(self, now_s: float) -> socket.socket:
        """Start the worker; returns our end of its socket pair."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = inherited_environment() | dict(self._command.environment)
            self.process = subprocess.Popen(
                [
                    *(str(self._command.python), "-m", "triton_omni.backends.worker", "--fd", str(theirs.fileno())),
                    *self._command.arguments,
                ],
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                cwd="/",
            )
        self.started_s = now_s
        self.ready_s = None
        self.state = "starting" if self.restarts == 0 else "restarting"
        return ours

    def join(self, peer: Peer, name: str, now_s: float) -> str:
        """Why a worker that was started by other means is refused."""
        return "the stage's worker is started by the server itself (no `place` is deployed)"

    def is_ready(self, now_s: float) -> None:
        """Record that the worker is ready. Only time after this counts as healthy for the back-off."""
        self.ready_s = now_s
        self.state = "ready"

    def died(self, now_s: float) -> None:
        """Record the worker's death and schedule the next start."""
        self.kill()
        self.gpu_paths = ""
        pause = self._backoff.died(0.0 if self.ready_s is None else now_s - self.ready_s)
        if pause is None:
            self.state = "gave_up"
            log.error("the worker died %d times in a row; giving up", self._backoff.deaths)
        else:
            self.state = "restarting"
            self.restarts += 1
            self.retry_s = now_s + pause
            log.warning("the worker died; next start in %.1f s", pause)

    def is_stopped(self) -> bool:
        """True if the process is stopped by a signal: alive, but not running."""
        return paths.is_stopped(self.pid)

    def due(self, now_s: float) -> bool:
        """True if it is time to start the worker again."""
        return self.process is None and self.state == "restarting" and now_s >= self.retry_s

    def kill(self) -> None:
        """Kill the process if it runs, and reap it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def terminate(self) -> None:
        """Ask the process to end, without waiting for it."""
        if self.process is not None:
            self.process.terminate()

    def stop(self) -> None:
        """Terminate the process; kill it after TERMINATE_S."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(TERMINATE_S)
        except subprocess.TimeoutExpired:
            log.warning("the worker did not exit within %g s; killing it", TERMINATE_S)
        self.kill()
