# SPDX-License-Identifier: Apache-2.0
"""Servers that many tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.triton_server import RunningServer


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the server that was tested: TRITON_OMNI_SERVER may point at another one."""
    kit = sys.modules.get("tests.kit.triton_server")
    if kit is not None and kit.VERSIONS:
        terminalreporter.write_line(f"tritonserver {', '.join(sorted(kit.VERSIONS))}")


@pytest.fixture(scope="session")
def toy_server() -> Iterator[RunningServer]:
    """The toy pipeline on a bare tritonserver, as `tritonserver --model-repository` serves it; one per session."""
    from tests.kit.triton_server import TOY_REPOSITORY, running_server

    with running_server([TOY_REPOSITORY]) as server:
        yield server


@pytest.fixture(scope="session")
def chat_server() -> Iterator[RunningServer]:
    """The embedded default under the supervisor, with the OpenAI proxy; one per session."""
    from tests.kit.triton_server import CHAT_REPOSITORY, running_server

    with running_server([CHAT_REPOSITORY], supervised=True, proxy=True, timeout_s=600) as server:
        yield server
