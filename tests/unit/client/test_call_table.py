# SPDX-License-Identifier: Apache-2.0
"""The table of SDK calls over the real proxy and a stand-in of the server, which also draws and transcribes."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.kit.fake_backend import FakeBackend
from tests.kit.openai_calls import CALLS, Call, calls_for, judge
from tests.kit.proxy_server import running_proxy


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running_proxy(FakeBackend()) as proxy, proxy.sdk() as client:
        yield client


@pytest.mark.parametrize("call", calls_for("fake"))
def test_call(client: openai.OpenAI, call: Call) -> None:
    judge(client, call, "fake")


def test_the_table_is_long_and_has_every_method() -> None:
    assert len(CALLS) >= 200
    assert 60 < sum(call.status == 200 for call in CALLS) < len(CALLS) - 100
