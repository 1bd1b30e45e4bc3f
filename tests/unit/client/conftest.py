# SPDX-License-Identifier: Apache-2.0
"""A proxy with the real SDK in front and a fake server behind, for each test."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.kit.fake_backend import FakeBackend
from tests.kit.proxy_server import RunningProxy, running_proxy


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def proxy(backend: FakeBackend) -> Iterator[RunningProxy]:
    with running_proxy(backend) as running:
        yield running


@pytest.fixture
def sdk(proxy: RunningProxy) -> Iterator[openai.OpenAI]:
    with proxy.sdk() as client:
        yield client
