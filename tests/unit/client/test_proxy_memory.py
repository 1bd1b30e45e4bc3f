# SPDX-License-Identifier: Apache-2.0
"""Memory of a proxy with many clients that wait: idle connections and open streams."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.idle_clients import check_memory_of_waiting_clients

ROOT = Path(__file__).parents[3]
CHILD = """
import threading
from tests.kit.fake_backend import FakeBackend
from tests.kit.proxy_server import running_proxy
with running_proxy(FakeBackend(hold_after=2)) as proxy:
    print(proxy.port, flush=True)
    input()
"""


@pytest.mark.soak
def test_idle_connections_and_open_streams() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with ExitStack() as stack:
        stack.callback(child.wait, 30)
        stack.callback(child.communicate, "\n")
        assert child.stdout is not None
        chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
        check_memory_of_waiting_clients(int(child.stdout.readline()), child.pid, chat)
