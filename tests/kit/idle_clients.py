# SPDX-License-Identifier: Apache-2.0
"""Many clients that wait: connections that are kept alive after a response, and streams that have begun."""

from __future__ import annotations

import json
import resource
import socket
from contextlib import ExitStack
from typing import Any

from tests.kit.server_calls import pss_mib

IDLE = 600
STREAMS = 64
MAX_PSS_MB = 250
WAIT_S = 30


def check_memory_of_waiting_clients(port: int, pid: int, chat: dict[str, Any]) -> None:
    """The memory of a proxy, whose streams of `chat` begin with text and then stay silent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    begin = _request("/v1/chat/completions", json.dumps({**chat, "stream": True}).encode())
    with ExitStack() as stack:
        address = ("127.0.0.1", port)
        opened = [stack.enter_context(socket.create_connection(address, WAIT_S)) for _ in range(IDLE + STREAMS)]
        for connection in opened[:IDLE]:
            connection.sendall(_request("/v1/models"))
        for connection in opened[IDLE:]:
            connection.sendall(begin)
        for connection in opened[:IDLE]:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        for connection in opened[IDLE:]:
            answer = b""
            while b'"content":"w' not in answer:
                part = connection.recv(1 << 16)
                assert part, f"the stream ended: {answer!r}"
                answer += part
        used_mb = pss_mib([pid]) * (1 << 20) / 1e6
        print(f"proxy with {IDLE} idle connections and {STREAMS} open streams: PSS {used_mb:.0f} MB")
        assert used_mb < MAX_PSS_MB


def _request(path: str, body: bytes = b"") -> bytes:
    method = "POST" if body else "GET"
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
