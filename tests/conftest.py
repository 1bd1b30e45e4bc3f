# SPDX-License-Identifier: Apache-2.0
"""Makes `tests.kit` importable however pytest is started, and gives servers that many tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kit.triton_server import RunningServer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


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
