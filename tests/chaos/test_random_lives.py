# SPDX-License-Identifier: Apache-2.0
"""Random lives against the real server: cancels, failures, dying workers, slow readers, lost terminals, bad input.

After them: one end seen per request, every slot free, descriptors and names as before, and the metrics add up.
`make test` runs a short version, `make test-soak` the long one; both print what they counted.
"""

from __future__ import annotations

import random
import socket
from collections import Counter
from urllib.error import URLError

import pytest

from tests.kit.calls import health, holdings, idle, metrics
from tests.kit.load import Life, Plan, body, run_many
from tests.kit.server import TOY_REPOSITORY, RunningServer, running_server, wait_for

pytestmark = [pytest.mark.triton]
STAGES = ("tokens", "frames", "wave")
MODALITIES = (("text",), ("audio",), ("text", "audio"))
HOSTILE_IDS = ("", "same", "same", "a/b", "../../x", "req-1", "req-10", "x" * 256)


def random_plan(rng: random.Random, tokens: int, deaths: bool) -> Plan:
    """One life; most are good."""
    n = rng.randint(1, tokens)
    stages: dict[str, dict[str, object]] = {}
    stage, fate = rng.choice(STAGES), rng.random()
    if fate < 0.15:
        stages[stage] = {"fail_after": rng.randint(0, n)}
    elif fate < 0.20:
        stages[stage] = {"hold_after": rng.randint(0, n)}  # a lost terminal: only a deadline ends it
    elif fate < 0.25:
        stages[stage] = {"refuse": True}
    elif fate < 0.35:
        stages[stage] = {"frame_bytes": rng.choice([1, 8192, 8193, 1 << 20]), "burst": rng.randint(1, 20)}
    elif fate < 0.36 and deaths:
        stages[stage] = {rng.choice(["die_after", "raise_after"]): rng.randint(0, n)}
    plan = Plan(body(n, rng.choice(MODALITIES), **stages), timeout_s=60, request_id=rng.choice(HOSTILE_IDS))
    plan.body["deadlines"] = {"stall_s": 1.5, "first_output_s": 3.0}
    if rng.random() < 0.35:
        plan.cancel_after = rng.randint(0, n)
    if rng.random() < 0.05:
        plan.pause_s = 0.01
    return plan


def live(server: RunningServer, count: int, seed: int, tokens: int, deaths: bool) -> list[Life]:
    """Live `count` random lives and check what every life and the server must show afterwards."""
    rng = random.Random(seed)
    large = {stage: {"frame_bytes": 1 << 20} for stage in ("tokens", "frames")}
    run_many(server.grpc, [Plan(body(20, **large)) for _ in range(32)], 16)  # links, lanes and slabs exist
    wait_for(lambda: idle(server), 5, "idle before")
    before, counted = holdings(server), metrics(server)
    lives = run_many(server.grpc, [random_plan(rng, tokens, deaths) for _ in range(count)], 24)
    wait_for(lambda: health(server)["ready"], 60, "every worker back")
    run_many(server.grpc, [Plan(body(2)) for _ in range(4)], 4)  # the last request's end publishes the metrics
    wait_for(lambda: idle(server), 15, "every slot free")
    ends = Counter(life.ends[0].split("]")[0][:60] for life in lives)
    print(f"{count} lives, seed {seed}: {dict(ends)}")
    assert [life for life in lives if len(life.ends) != 1] == []
    assert ends["timeout"] == 0
    assert sum(life.order_errors for life in lives) == 0
    wait_for(lambda: grown(before, holdings(server)) == {}, 10, f"as before: {grown(before, holdings(server))}")
    reconcile(counted, metrics(server), count + 4)
    return lives


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What is held more of than before. A worker that died and came back holds fewer links until it needs them."""
    return {name: after[name] - n for name, n in before.items() if after[name] > n}


def reconcile(before: dict[str, float], after: dict[str, float], requests: int) -> None:
    """The page's ends add up to the requests, and nothing is in work."""
    ended = {k: v for k, v in after.items() if k.startswith("omni_requests_total")}
    assert sum(ended.values()) - sum(before.get(k, 0) for k in ended) == requests
    assert after['omni_requests_running{pipeline="toy"}'] == 0
    assert after['omni_requests_waiting{pipeline="toy"}'] == 0


def on_a_server(count: int, seed: int, deaths: bool) -> list[Life]:
    """Live on a bare server; once more if tritonserver itself crashed.

    Seen once in about twenty runs, under heavy load: the 24.10 server process ends in mid-run (its cause is open, see
    docs/operations.md). Two crashes in a row fail, and a crash is printed with the server's own backtrace.
    """
    for attempt in (1, 2):
        with running_server([TOY_REPOSITORY]) as server:
            try:
                return live(server, count, seed, tokens=40, deaths=deaths)
            except URLError:
                if attempt == 2 or is_serving(server):
                    raise
                print(f"tritonserver crashed:\n{server.log_tail(40)}")
    raise AssertionError("unreachable")


def is_serving(server: RunningServer) -> bool:
    """True if the server's process still takes connections."""
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", server.http_port)) == 0


@pytest.mark.timeout(300)
def test_random_lives() -> None:
    on_a_server(400, seed=1, deaths=False)


@pytest.mark.timeout(300)
def test_random_lives_with_dying_workers() -> None:
    lives = on_a_server(200, seed=2, deaths=True)
    assert any("the stage's worker died" in life.ends[0] or "raised" in life.ends[0] for life in lives)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_random_lives() -> None:
    with running_server([TOY_REPOSITORY]) as server:
        for seed in range(10, 20):
            live(server, 1000, seed, tokens=60, deaths=False)
        for seed in range(20, 25):
            live(server, 200, seed, tokens=60, deaths=True)
