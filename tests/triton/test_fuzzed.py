# SPDX-License-Identifier: Apache-2.0
"""Mutated requests of every route to a real server: each is answered, nothing is lost, and the server goes on.

`TRITON_OMNI_MUTANTS` and `TRITON_OMNI_SEED` run it in pieces: another seed makes other mutants.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.kit.proxy_server import RunningProxy, proxy_process
from tests.kit.request_mutations import (
    READ_ROUTES,
    REFUSING,
    ROUTES,
    fault_of,
    mutants,
    preparations,
    undoing,
)
from tests.kit.server_calls import pss_mib, wait_until_idle
from tests.kit.triton_server import RunningServer

pytestmark = [pytest.mark.triton, pytest.mark.soak]
MUTANTS = int(os.environ.get("TRITON_OMNI_MUTANTS", "10000"))
SEED = int(os.environ.get("TRITON_OMNI_SEED", "0"))
SECONDS = 30.0
LEAST_SHARE = 0.05
SLACK_MIB = 64.0


@pytest.fixture(scope="module")
def toy_voices(toy_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """A proxy that takes uploads, with what mutants name."""
    folder = str(tmp_path_factory.mktemp("voices"))
    with proxy_process("--triton", toy_server.grpc, "--metrics", toy_server.metrics, "--voices", folder) as proxy:
        yield prepared(proxy)


def prepared(proxy: RunningProxy) -> RunningProxy:
    with httpx.Client(base_url=proxy.root, timeout=SECONDS) as client:
        for options in preparations():
            assert client.request(**options).status_code == 200
    return proxy


def send_all(proxy: RunningProxy, route: str, model: str, count: int) -> Counter[int]:
    """Status → responses. Fails for the first fault, and for a request without a response in time."""
    statuses = Counter[int]()
    with httpx.Client(base_url=proxy.root, timeout=SECONDS) as client:
        for mutant in mutants(route, model, count, SEED):
            response = client.request(**mutant.options())
            statuses[response.status_code] += 1
            fault = fault_of(response)
            assert not fault, f"{fault}\n{mutant}"
            for options in undoing(mutant, response):
                assert client.request(**options).status_code == 200
        assert client.get("/health").status_code == 200
    print(f"{model} {route}: {dict(sorted(statuses.items()))}")
    return statuses


def check_share(route: str, statuses: Counter[int]) -> None:
    good = sum(count for status, count in statuses.items() if status < 300)
    assert route in REFUSING or good >= LEAST_SHARE * statuses.total(), statuses


@pytest.mark.parametrize("route", [*ROUTES, *READ_ROUTES])
def test_mutants(toy: RunningServer, toy_voices: RunningProxy, route: str) -> None:
    pids = [*toy.processes(), toy_voices.pid]
    send_all(toy_voices, route, "toy", min(MUTANTS, 200))  # pools, links and caches exist before memory is measured
    before = pss_mib(pids)
    statuses = send_all(toy_voices, route, "toy", MUTANTS)
    wait_until_idle(toy)
    assert pss_mib(pids) <= before + SLACK_MIB
    if route not in ("/v1/audio/transcriptions", "/v1/images/generations", "/v1/images/edits"):  # not the toy's
        check_share(route, statuses)
