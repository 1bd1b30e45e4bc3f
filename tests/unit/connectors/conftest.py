# SPDX-License-Identifier: Apache-2.0
"""Two ends of a packet socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from triton_omni.backends.connectors.link import Link


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    a, b = (Link(s) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield a, b
    a.close()
    b.close()
