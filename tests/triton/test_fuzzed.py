# SPDX-License-Identifier: Apache-2.0
"""Mutated requests of every route to a real server: it answers each of them, loses nothing, and goes on."""

from __future__ import annotations

import httpx
import pytest

from tests.kit.request_mutations import ROUTES, fault_of, mutants
from tests.kit.server_calls import wait_until_idle
from tests.kit.triton_server import RunningServer

pytestmark = pytest.mark.triton
MUTANTS = 10_000
SECONDS = 30.0


@pytest.mark.soak
@pytest.mark.parametrize("route", ROUTES)
def test_mutants(toy: RunningServer, toy_proxy_url: str, route: str) -> None:
    with httpx.Client(base_url=toy_proxy_url, timeout=SECONDS) as client:
        for mutant in mutants(route, "toy", MUTANTS):
            headers = httpx.Headers(list(mutant.headers.items()))
            fault = fault_of(client.post(route, content=mutant.content, headers=headers))
            assert not fault, f"{fault}\n{mutant}"
        assert client.get("/health").status_code == 200
    wait_until_idle(toy)
