# SPDX-License-Identifier: Apache-2.0
"""The real proxy over a given backend, on a free port of this machine, in a thread."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import uvicorn
from starlette.types import ASGIApp

from triton_omni.openai.backend import Backend
from triton_omni.openai.http.app import make_app
from triton_omni.openai.http.protocol import KEEP_ALIVE_S, MAX_HEAD_BYTES, Protocol
from triton_omni.openai.http.settings import Settings

JOIN_S = 20.0


@dataclass(frozen=True)
class RunningProxy:
    """Where a proxy listens; `pid` of one that is a process of its own."""

    port: int
    pid: int = 0

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sdk(self, **options: Any) -> openai.OpenAI:
        """A real SDK client of it."""
        return openai.OpenAI(
            base_url=f"{self.root}/v1", **{"api_key": "any", "max_retries": 0, "timeout": 30, **options}
        )


@contextmanager
def proxy_process(*options: str) -> Iterator[RunningProxy]:
    """`python -m triton_omni.openai` with these options, as users start it; ended by a signal and waited for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    child = subprocess.Popen(
        [sys.executable, "-m", "triton_omni.openai", "--port", str(port), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tempfile.gettempdir(),
    )  # fmt: skip
    assert child.stdout is not None
    try:
        said: list[str] = []
        for line in child.stdout:  # ends when the child does
            said.append(line)
            if "running on" in line:
                break
        else:
            raise AssertionError(f"the proxy did not start: {''.join(said)}")
        threading.Thread(target=child.stdout.read, daemon=True).start()  # a full pipe would stop it
        yield RunningProxy(port, child.pid)
    finally:
        child.terminate()
        assert child.wait(JOIN_S) in (0, -signal.SIGTERM), f"the proxy ended with {child.returncode}"
        child.stdout.close()


@contextmanager
def running_proxy(
    backend: Backend, settings: Settings | None = None, *, keep_alive_s: int = KEEP_ALIVE_S
) -> Iterator[RunningProxy]:
    """A proxy for the `with` body."""
    with running_app(make_app(backend, settings or Settings()), keep_alive_s=keep_alive_s) as proxy:
        yield proxy


@contextmanager
def running_app(app: ASGIApp, *, keep_alive_s: int = KEEP_ALIVE_S) -> Iterator[RunningProxy]:
    """Any app behind the proxy's HTTP protocol, for the `with` body."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=1, lifespan="auto",
        http=Protocol, timeout_keep_alive=keep_alive_s, h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()  # the listener takes connections at once, so there is nothing to wait for
    try:
        yield RunningProxy(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(JOIN_S)
        listener.close()
        assert not thread.is_alive(), "the proxy did not end"
