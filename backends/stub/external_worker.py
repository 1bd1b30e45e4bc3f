# SPDX-License-Identifier: Apache-2.0
"""A worker that is started by other means, on any host, and joins its stub over TCP."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence

from triton_omni.backends.control.hub import Hub, Peer
from triton_omni.backends.control.link_settings import KEY_FILE_VARIABLE, LinkSettings
from triton_omni.backends.control.records import State

log = logging.getLogger("triton_omni.stub")


class ExternalWorker:
    """The place of one such worker: what the stub's loop asks of a WorkerProcess. All times are passed in."""

    pid = 0  # of another host: not in our /proc

    def __init__(self, hub: Hub, command: str) -> None:
        self.state: State = "waiting"
        self.restarts = 0
        self.started_s = 0.0
        self.ready_s: float | None = None
        self.gpu_paths = ""
        self._hub = hub
        self._command = command
        self._peer: Peer | None = None

    @property
    def placement(self) -> str:
        """What starts the worker, while there is none; or where it was placed."""
        return f"start it on its host with: {self._command}" if self._peer is None else ""

    def start(self, now_s: float) -> None:
        """Wait for a worker to join."""
        log.warning("waiting for a worker to join; `triton-omni doctor` shows the command that starts it")

    def join(self, peer: Peer, name: str, now_s: float) -> str:
        """Take a worker that has dialed; returns why it is refused, or ""."""
        if peer.name != self._hub.name:
            return f"this is the stub of {self._hub.name}, the worker is of {peer.name}"
        if self._peer is not None:
            return "the stage has all its workers already"
        log.info("worker %s has joined from %s", name, peer.listens_at)
        self._peer, self.started_s, self.ready_s, self.state = peer, now_s, None, "starting"
        return ""

    def is_ready(self, now_s: float) -> None:
        """Record that the worker is ready."""
        self.ready_s, self.state = now_s, "ready"

    def died(self, now_s: float) -> None:
        """Record the worker's death; the next one may join."""
        self.kill()
        self.gpu_paths, self.state = "", "waiting"
        self.restarts += 1
        self.start(now_s)

    def is_stopped(self) -> bool:
        """A process of another host cannot be looked at; `hang_s` bounds its silence."""
        return False

    def due(self, now_s: float) -> bool:
        """False: it is not for us to start it."""
        return False

    def kill(self) -> None:
        """Close the link: the worker ends itself."""
        if self._peer is not None:
            peer, self._peer = self._peer, None
            self._hub.drop(peer)

    terminate = stop = kill


def external_command(
    stub_address: str, links: LinkSettings, arguments: Sequence[str], environment: Mapping[str, str]
) -> str:
    """The command that starts a worker on another host; the key file and TLS's files are copied there."""
    variables = {KEY_FILE_VARIABLE: links.key_file} | dict(environment)
    words = [f"{name}={value}" for name, value in variables.items()]
    words += ["python", "-m", "triton_omni.backends.worker", "--stub", stub_address, *arguments]
    return "env " + shlex.join([*words, *(["--tls", *links.tls] if links.tls else [])])
