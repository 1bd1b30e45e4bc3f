# SPDX-License-Identifier: Apache-2.0
"""Servers that many tests share: one per session, started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.server import CHAT_REPOSITORY, TOY_REPOSITORY, RunningServer, running_server


@pytest.fixture(scope="session")
def toy_server() -> Iterator[RunningServer]:
    """The toy pipeline on a bare tritonserver, as `tritonserver --model-repository` serves it."""
    with running_server([TOY_REPOSITORY]) as server:
        yield server


@pytest.fixture(scope="session")
def chat_server() -> Iterator[RunningServer]:
    """The embedded default under the supervisor, with the OpenAI proxy."""
    with running_server([CHAT_REPOSITORY], supervised=True, proxy=True, timeout_s=600) as server:
        yield server
