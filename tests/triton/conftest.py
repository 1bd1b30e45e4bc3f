# SPDX-License-Identifier: Apache-2.0
"""The session's bare server with the toy pipeline, under the short name this folder uses."""

from __future__ import annotations

import pytest

from tests.kit.server import RunningServer


@pytest.fixture
def toy(toy_server: RunningServer) -> RunningServer:
    """A bare server: everything but the death of a stub must work without a supervisor."""
    return toy_server
