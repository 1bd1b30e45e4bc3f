# SPDX-License-Identifier: Apache-2.0
"""Two ends of TCP over loopback, greeted or not; and certificates of a private authority."""

from __future__ import annotations

import functools
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.kit.connector_contract import closing
from triton_omni.backends.connectors.base import Credits
from triton_omni.backends.connectors.greeting import Greeting
from triton_omni.backends.connectors.tcp import TcpConnector, TcpLink

KEY = b"k" * 32
PATIENCE_S = 10.0


def sockets(host: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """A connected pair: who dialed, who accepted."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        dialed = socket.create_connection(listener.getsockname()[:2])
        return dialed, listener.accept()[0]


def end_of(sock: socket.socket, dials: bool, key: bytes = KEY, tls: ssl.SSLContext | None = None) -> TcpConnector:
    return TcpConnector(TcpLink(sock, Greeting(key, dials), tls, dials))


def greet(*ends: TcpConnector) -> None:
    """Let both ends greet each other until they trust each other; raises PeerLost."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(end.link.trusted for end in ends):
        assert time.monotonic() < deadline, "the greeting never ended"
        for end in ends:
            if not end.link.trusted:
                end.link.greet()


def pair(window: int, limit: int, tls: tuple[ssl.SSLContext | None, ssl.SSLContext | None] = (None, None)):
    """A context manager of two greeted ends, as the connector contract wants it."""
    a, b = (end_of(s, i == 0, tls=tls[i]) for i, s in enumerate(sockets()))
    greet(a, b)
    for end in (a, b):
        end.credits = Credits(window, limit)
    return closing(a, b)


@functools.cache
def certificates() -> tuple[Path, Path, Path]:
    """(certificate, key, authority's certificate) of one process; skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = Path(tempfile.mkdtemp(prefix="omni-tls-"))
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=omni"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key, cert
