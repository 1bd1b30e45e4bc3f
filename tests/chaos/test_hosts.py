# SPDX-License-Identifier: Apache-2.0
"""Workers on other hosts, whose cables are cut and healed: network namespaces, which need root."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.kit.budgets import within
from tests.kit.network_hosts import network_hosts, why_not
from tests.kit.tcp_ends import KEY
from tests.kit.toy_hosts import toy_hosts
from triton_omni.backends.control.address import parse_address
from triton_omni.backends.control.hub import Hub, Lost
from triton_omni.backends.control.link_settings import LinkSettings
from triton_omni.backends.control.messages import StopMessage
from triton_omni.backends.core.errors import OmniError, StageFailed
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
PULSE_S = 5.0  # a cut is seen within this, on a machine that is not loaded
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def network():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with network_hosts(2) as (address, hosts):
        yield address, hosts


@pytest.fixture
def links(network, tmp_path):
    file = tmp_path / "link.key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    yield LinkSettings(network[0], KEY, key_file=str(file))
    for host in network[1]:
        host.heal()


def chat(count, /, **stages):
    return GenerateRequest(
        messages=(Message("user", "a b c"),), modalities=("text", "audio"), sampling=Sampling(max_tokens=count),
        stages=stages,
    )  # fmt: skip


def test_a_chain_over_three_hosts_then_a_cut_and_a_heal(tmp_path, links, network, record_property):
    _, (b, c) = network
    with toy_hosts(tmp_path, links, ["tokens", "frames"]) as hosts:
        hosts.join("tokens", b.prefix)
        worker = hosts.join("frames", c.prefix)
        where = parse_address(hosts.stubs["frames"].address)
        assert c.address in where.tcp and not where.is_local
        whole = hosts.call(chat(30, tokens={"frame_bytes": 100_000}))
        assert not isinstance(whole.outcome(), OmniError)
        assert [len(whole.of(output)) > 0 for output in ("text", "audio")] == [True, True]
        running = [hosts.call(chat(100_000, tokens={"delay_s": 0.01}), f"r{i}") for i in range(4)]
        for call in running:
            assert call.first.wait(within(20))
        c.cut()
        cut_s = time.monotonic()
        for call in running:
            end = call.outcome()
            assert isinstance(end, StageFailed), end
        record_property("seconds from the cut to the ends", time.monotonic() - cut_s)
        print(f"\nends {time.monotonic() - cut_s:.1f} s after the cut")
        assert worker.wait(within(4 * PULSE_S)) == 0, "a worker that is cut off ends itself"
        c.heal()
        hosts.join("frames", c.prefix)
        again = hosts.call(chat(30, tokens={"frame_bytes": 100_000}))
        assert not isinstance(again.outcome(), OmniError)
        assert all(again.of(output) == whole.of(output) for output in ("text", "audio"))


def test_two_workers_of_one_other_host_use_its_shared_memory(tmp_path, links, network):
    _, (b, _) = network
    with toy_hosts(tmp_path, links, ["tokens", "frames"]) as hosts:
        for stage in ("tokens", "frames"):
            hosts.join(stage, b.prefix)
        assert not isinstance(hosts.call(chat(20, tokens={"frame_bytes": 1 << 20})).outcome(), OmniError)
        pid = hosts.workers["frames"].pid
        assert "memfd:triton-omni" in Path(f"/proc/{pid}/maps").read_text()


def test_a_cut_within_the_greeting_is_a_loss_in_time(links, network):
    """The dialer's first part reaches a listener whose answer does not come back."""
    _, (b, _) = network
    listener, dialer = Hub("l", links=links, joinable=True), Hub("d", links=links)
    peer = dialer.connect(listener.address)
    peer.send(StopMessage(b"r" * 16))
    b.cut()
    gone = dialer.connect(f"tcp://{b.address}:7400")
    items, deadline = [], time.monotonic() + within(4 * PULSE_S)
    while not gone.lost:
        assert time.monotonic() < deadline, "no answer, and no loss"
        items += dialer.poll(0.1)
        listener.poll(0)
    assert [type(item) for source, item in items if source is gone] == [Lost]
    assert not peer.lost, "the other link goes on"
    dialer.close()
    listener.close()


def test_a_worker_that_is_cut_off_while_it_joins_ends_and_leaves_the_place_free(tmp_path, links, network):
    _, (b, _) = network
    with toy_hosts(tmp_path, links, ["wave"]) as hosts:
        b.cut()
        with pytest.raises(AssertionError, match="not ready"):
            hosts.join("wave", b.prefix, wait_s=PULSE_S)
        assert hosts.workers["wave"].wait(within(4 * PULSE_S)) == 1
        b.heal()
        hosts.join("wave", b.prefix)
        assert not isinstance(hosts.call(chat(10)).outcome(), OmniError)


def test_a_long_step_with_a_full_window_is_no_death(tmp_path, links, network):
    """For longer than any probe waits the consumer reads nothing, while more than its window wants to come."""
    _, (b, _) = network
    with toy_hosts(tmp_path, links, ["wave"]) as hosts:
        hosts.join("wave", b.prefix)
        flood = hosts.call(chat(60, tokens={"frame_bytes": 4 << 20}, frames={"frame_bytes": 4 << 20}))
        assert flood.first.wait(within(20))
        hangs = hosts.call(chat(1, wave={"hang_after": 0, "hang_s": 2.5 * PULSE_S}))
        for call in (flood, hangs):
            end = call.outcome()
            assert not isinstance(end, OmniError), end
