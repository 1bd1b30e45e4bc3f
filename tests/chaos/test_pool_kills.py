# SPDX-License-Identifier: Apache-2.0
"""A thousand requests while workers of a pool are killed, one at a time, at least twenty of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.pool_kills import load_under_kills, pool_repository
from tests.kit.server_calls import wait_until_idle
from tests.kit.triton_server import running_server

pytestmark = [pytest.mark.triton, pytest.mark.chaos, pytest.mark.timeout(1200)]


def test_a_thousand_requests_and_twenty_kills(tmp_path: Path) -> None:
    with running_server([pool_repository(tmp_path)]) as server:
        fates, kills = {"completed": 0, "failed with output": 0}, 0
        requests = 0
        while requests < 1000 or kills < 20:
            more, killed = load_under_kills(server, requests=250, seed=requests)
            fates = {fate: count + more[fate] for fate, count in fates.items()}
            kills, requests = kills + killed, requests + 250
        print(f"{requests} requests, {kills} kills: {fates}")
        wait_until_idle(server)
