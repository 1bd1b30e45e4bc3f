# SPDX-License-Identifier: Apache-2.0
"""An end with requests in flight: short ones finish, and no client waits longer than the supervisor's bound."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.kit.load_generator import Life, Plan, body, run_many
from tests.kit.triton_server import TOY_REPOSITORY, running_server, wait_for
from triton_omni.backends.control import probe

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]


def test_what_does_not_finish_in_time_is_cut_off() -> None:
    lives: list[Life] = []
    with running_server([TOY_REPOSITORY], supervised=True) as server:
        plans = [Plan(body(n, ("text",), tokens={"delay_s": 0.05}), timeout_s=90) for n in (20, 4000)]
        clients = threading.Thread(target=lambda: lives.extend(run_many(server.grpc, plans, 2)))
        clients.start()
        wait_for(lambda: probe(server.instance("toy_tokens").address, 5).live == 2, 20, "both are running")
        os.kill(server.supervisor_pid, signal.SIGTERM)
        clients.join(60)
        assert not clients.is_alive()
    assert lives[0].ends == ["length"]
    assert len(lives[1].ends) == 1
    assert lives[1].ends[0].startswith("error"), lives[1].ends
