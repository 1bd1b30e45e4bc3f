# SPDX-License-Identifier: Apache-2.0
"""The session's bare server with the toy pipeline, under the short name this folder uses, and a proxy for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.triton_server import RunningServer


@pytest.fixture
def toy(toy_server: RunningServer) -> RunningServer:
    """A bare server: everything but the death of a stub must work without a supervisor."""
    return toy_server


@pytest.fixture(scope="session")
def toy_proxy_url(toy_server: RunningServer) -> Iterator[str]:
    """Root URL of an OpenAI proxy in front of the session's toy server."""
    from tests.kit.proxy_server import proxy_process

    with proxy_process("--triton", toy_server.grpc, "--metrics", toy_server.metrics) as proxy:
        yield proxy.root
