# SPDX-License-Identifier: Apache-2.0
"""Workers that join over TCP serve as workers of this host do: same bytes, order and ends; and deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.budgets import within
from tests.kit.tcp_ends import KEY, certificates
from tests.kit.toy_hosts import STAGES, toy_hosts
from triton_omni.backends.control.address import parse_address
from triton_omni.backends.control.hub import Hub
from triton_omni.backends.control.link_settings import KEY_FILE_VARIABLE, LinkSettings
from triton_omni.backends.core.errors import OmniError, StageFailed, Unavailable
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def links(tmp_path):
    file = tmp_path / "link.key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    return LinkSettings("127.0.0.1", KEY, key_file=str(file))


def chat(count, /, **stages):
    return GenerateRequest(
        messages=(Message("user", "a b c"),), modalities=("text", "audio"), sampling=Sampling(max_tokens=count),
        stages=stages,
    )  # fmt: skip


REQUESTS = {
    "small": chat(30),
    "large": chat(12, tokens={"frame_bytes": 200_000}, frames={"frame_bytes": 3 << 20}),
    "slow reader": chat(40, wave={"delay_s": 0.005}),
    "refused": chat(5, frames={"refuse": True}),
    "failed": chat(30, frames={"fail_after": 7}),
}


def outcomes(hosts):
    """What a client gets of each request: pieces of each output in order, and the end."""
    got = {}
    for name, request in REQUESTS.items():
        call = hosts.call(request)
        end = call.outcome()
        pieces = {output: call.of(output) for output in ("text", "audio")} if not isinstance(end, OmniError) else {}
        what = (type(end), str(end)) if isinstance(end, OmniError) else (end.event.outcome, end.event.finish_reason)
        got[name] = (pieces, what)
    return got


def wait_idle(hosts):
    deadline = time.monotonic() + within(20)
    while hosts.live:
        assert time.monotonic() < deadline, f"{hosts.live} requests or runs are held"
        time.sleep(0.05)


def test_joined_workers_give_the_same_bytes_order_and_ends(tmp_path, links):
    (tmp_path / "here").mkdir(), (tmp_path / "there").mkdir()
    with toy_hosts(tmp_path / "here") as hosts:
        expected = outcomes(hosts)
    assert len(expected["small"][0]["audio"]) > 5
    with toy_hosts(tmp_path / "there", links, STAGES) as hosts:
        refused = hosts.call(chat(3)).outcome()
        assert isinstance(refused, Unavailable) and "waits for a worker to join" in str(refused)
        for stage in STAGES:
            hosts.join(stage, token=f"host of {stage}")
            where = parse_address(hosts.stubs[stage].address)
            assert where.tcp and not where.is_local
        assert outcomes(hosts) == expected
        wait_idle(hosts)


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_a_joined_worker_works_beside_workers_of_this_host(tmp_path, links, secured):
    tls = tuple(map(str, certificates())) if secured else ()
    links = LinkSettings(links.host, KEY, tls=tls, key_file=links.key_file)
    with toy_hosts(tmp_path, links, ["frames"]) as hosts:
        worker = hosts.join("frames", token="another host")
        end = hosts.call(chat(20)).outcome()
        assert not isinstance(end, OmniError), end
        held = hosts.call(chat(100, tokens={"delay_s": 0.05}))
        assert held.first.wait(within(20))
        worker.send_signal(signal.SIGKILL)
        died = held.outcome()
        assert isinstance(died, StageFailed) and "worker died" in str(died)
        refused = hosts.call(chat(3)).outcome()
        assert isinstance(refused, Unavailable) and "waits for a worker to join" in str(refused)
        hosts.join("frames", token="a third host")
        end = hosts.call(chat(20)).outcome()
        assert not isinstance(end, OmniError), end
        assert hosts.stubs["frames"].worker.restarts == 1
        wait_idle(hosts)


def test_a_pool_of_joined_workers_loses_no_request_without_output(tmp_path, links):
    """One of two is killed again and again while requests run; those that had no output go to the other one."""
    with toy_hosts(tmp_path, links, ["frames"], instances=2) as hosts:
        pool = [hosts.join("frames", token=f"host {n}") for n in range(2)]
        ends = []
        for round_ in range(4):
            calls = [hosts.call(chat(3, frames={"delay_s": 0.01}), f"{round_}-{i}") for i in range(25)]
            pool[round_ % 2].kill()
            pool[round_ % 2].wait(10)
            for call in calls:
                end = call.outcome()
                had_output = bool(call.of("audio")) or bool(call.of("text"))
                assert not isinstance(end, OmniError) or had_output, end
                ends.append(type(end).__name__)
            pool[round_ % 2] = hosts.join("frames", token=f"host {round_ + 2}")
        assert ends.count("Response") > 50, ends
        wait_idle(hosts)


def test_a_worker_ends_itself_when_its_stub_is_gone(tmp_path, links):
    with toy_hosts(tmp_path, links, ["wave"]) as hosts:
        worker = hosts.join("wave", token="another host")
        assert os.listdir(hosts.scratch)
        hosts.stubs["wave"].hub.post(hosts.stubs["wave"].worker.kill)
        assert worker.wait(within(10)) == 0
        assert not os.listdir(hosts.scratch), "its folder is removed"


def test_a_worker_that_hangs_is_let_go(tmp_path, links):
    with toy_hosts(tmp_path, links, ["wave"], hang_s=2.0) as hosts:
        worker = hosts.join("wave", token="another host")
        worker.send_signal(signal.SIGSTOP)
        assert hosts.stubs["wave"].lost.wait(within(20)), "its silence was not noticed"
        worker.send_signal(signal.SIGCONT)
        assert worker.wait(within(10)) == 0, "it ends itself: another may have its place"


def run_worker(stub, stage, key_file, *more):
    """A worker started by hand that is refused; its standard error."""
    command = [sys.executable, "-m", "triton_omni.backends.worker", "--pipeline", "toy", "--stage", stage, *more]
    done = subprocess.run(
        [*command, *(["--stub", stub] if stub else [])], env={**os.environ, KEY_FILE_VARIABLE: str(key_file)},
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode, "it must not serve"
    return done.stderr


def test_a_worker_that_cannot_join_says_why(tmp_path, links):
    other = tmp_path / "other.key"
    other.write_bytes(b"o" * 32)
    other.chmod(0o644)
    with toy_hosts(tmp_path, links, ["wave"]) as hosts:
        stub = hosts.stubs["wave"].hub.address
        assert "must be readable by its owner only (mode 644)" in run_worker(stub, "wave", other)
        other.chmod(0o600)
        assert "does not know the key" in run_worker(stub, "wave", other)
        assert "No such file or directory; a key is made by: head" in run_worker(stub, "wave", tmp_path / "none")
        assert "Connection refused" in run_worker("tcp://127.0.0.1:1", "wave", links.key_file)
        assert "address must be tcp://host:port" in run_worker("127.0.0.1:1", "wave", links.key_file)
        assert "this is the stub of toy/wave, the worker is of toy/frames" in run_worker(stub, "frames", links.key_file)
        hosts.join("wave", token="another host")
        assert "the stage has all its workers already" in run_worker(stub, "wave", links.key_file)
        assert "either --stub, or --fd and --address must be given" in run_worker("", "wave", links.key_file)
        assert not isinstance(hosts.call(chat(3)).outcome(), OmniError), "those who were refused hurt nothing"


def test_a_stub_without_place_takes_no_worker(tmp_path, links):
    with toy_hosts(tmp_path, links) as hosts:
        hub = hosts.stubs["wave"].hub
        assert hub.address == "", "it does not even listen"
        own = hosts.stubs["wave"].address
        assert parse_address(own).tcp, "its worker listens for workers of other hosts"
        stranger = Hub("toy/wave", links=LinkSettings("127.0.0.1", b"o" * 32))
        peer = stranger.connect(parse_address(own).tcp)
        deadline = time.monotonic() + within(20)
        while not peer.lost:
            assert time.monotonic() < deadline
            stranger.poll(0.05)
        stranger.close()
