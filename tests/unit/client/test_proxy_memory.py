# SPDX-License-Identifier: Apache-2.0
"""Memory of a proxy with many clients that wait: idle connections and open streams."""

from __future__ import annotations

import json
import re
import resource
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

IDLE = 600
STREAMS = 64
MAX_PSS_MB = 250
ROOT = Path(__file__).parents[3]
CHILD = """
import threading
from tests.kit.fake_backend import FakeBackend
from tests.kit.proxy_server import running_proxy
with running_proxy(FakeBackend(hold_after=2)) as proxy:
    print(proxy.port, flush=True)
    input()
"""


def pss_mb(pid: int) -> float:
    """Memory of a process; what it shares with others counts in parts."""
    match = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) / 1024


def request(path: str, body: bytes = b"") -> bytes:
    method = "POST" if body else "GET"
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.soak
def test_idle_connections_and_open_streams() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    chat = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with ExitStack() as stack:
        stack.callback(child.wait, 30)
        stack.callback(child.communicate, "\n")
        assert child.stdout is not None
        port = int(child.stdout.readline())
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(IDLE + STREAMS)]
        for connection in opened[:IDLE]:
            connection.sendall(request("/v1/models"))
        for connection in opened[IDLE:]:
            connection.sendall(request("/v1/chat/completions", chat))
        for connection in opened[:IDLE]:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        for connection in opened[IDLE:]:
            answer = b""
            while b"w1 " not in answer:
                part = connection.recv(1 << 16)
                assert part, "the stream ended"
                answer += part
        used_mb = pss_mb(child.pid)
        print(f"proxy with {IDLE} idle connections and {STREAMS} open streams: PSS {used_mb:.0f} MB")
        assert used_mb < MAX_PSS_MB
