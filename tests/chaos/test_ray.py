# SPDX-License-Identifier: Apache-2.0
"""A stage placed by Ray on a local cluster of two nodes; one node is killed. Needs an interpreter with Ray, named by
TRITON_OMNI_TEST_RAY_PYTHON (an environment of its own: `pip install ray`)."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.budgets import within
from tests.kit.tcp_ends import KEY
from tests.kit.toy_hosts import toy_hosts
from triton_omni.backends.control.link_settings import LinkSettings
from triton_omni.backends.core.errors import OmniError
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling
from triton_omni.backends.stub.links import PLACER

PYTHON = os.environ.get("TRITON_OMNI_TEST_RAY_PYTHON", "")
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON, reason="TRITON_OMNI_TEST_RAY_PYTHON names no interpreter with Ray"),
]
KIT = Path(__file__).resolve().parents[1] / "kit"


class RayCluster:
    """A cluster in a child process."""

    def __init__(self, nodes: int) -> None:
        self.process = subprocess.Popen(
            [PYTHON, str(KIT / "ray_cluster.py"), str(nodes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address = self._line("address ").removeprefix("address ")

    def order(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        self._line("done")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def _line(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # Ray prints too
            if line.startswith(start):
                return line.strip()
        raise AssertionError("the cluster ended")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    made = RayCluster(1)
    yield made
    made.close()


def chat(count: int, /, **stages: dict[str, object]) -> GenerateRequest:
    return GenerateRequest(
        messages=(Message("user", "a b c"),), modalities=("text", "audio"), sampling=Sampling(max_tokens=count),
        stages=stages,
    )  # fmt: skip


def until(true, what: str) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + within(90)
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.1)


def test_a_stage_on_a_node_that_is_killed(tmp_path: Path, cluster: RayCluster) -> None:
    links = LinkSettings("127.0.0.1", KEY)
    with toy_hosts(tmp_path, links, ["frames"], placer=[PYTHON, str(PLACER), cluster.address]) as hosts:
        hosts.wait_ready("frames")
        stub = hosts.stubs["frames"]
        first = stub.worker.placement
        assert first.startswith("on node ")
        assert not isinstance(hosts.call(chat(10)).outcome(), OmniError)
        assert isinstance(hosts.call(chat(20, frames={"die_after": 3})).outcome(), OmniError)
        until(lambda: stub.worker.restarts == 1 and stub.loop.state == "ready", "placed again after a death")
        running = hosts.call(chat(10_000, tokens={"delay_s": 0.01}))
        assert running.first.wait(within(30))
        cluster.order("kill")
        assert isinstance(running.outcome(), OmniError), "a node's death ends what it had a part in"
        cluster.order("add")
        until(lambda: stub.loop.state == "ready", "placed on the new node")
        assert stub.worker.placement != first
        assert not isinstance(hosts.call(chat(10)).outcome(), OmniError)


def test_a_demand_that_the_cluster_cannot_meet_is_explained(tmp_path: Path, cluster: RayCluster) -> None:
    links = LinkSettings("127.0.0.1", KEY)
    placer = [PYTHON, str(PLACER), cluster.address]
    with toy_hosts(tmp_path, links, ["wave"], placer=placer, demand={"cpus": 64.0}) as hosts:
        wanted = "needs 64 CPU; none of the 2 node(s) of the cluster has that"
        until(lambda: hosts.stubs["wave"].worker.placement == wanted, "the reason")
