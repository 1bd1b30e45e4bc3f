# SPDX-License-Identifier: Apache-2.0
"""The table of SDK calls over the real proxy and a real tritonserver with the toy pipeline."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.kit.openai_calls import Call, calls_for, judge
from tests.kit.server_calls import wait_until_idle
from tests.kit.triton_server import RunningServer

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def client(toy_proxy_url: str, toy_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{toy_proxy_url}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client
    wait_until_idle(toy_server)


@pytest.mark.parametrize("call", calls_for("toy"))
def test_call(client: openai.OpenAI, call: Call) -> None:
    judge(client, call, "toy")
