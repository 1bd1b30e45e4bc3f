# SPDX-License-Identifier: Apache-2.0
"""The choice of a pool's worker for a run."""

from __future__ import annotations

import random

from triton_omni.backends.stub.choose import BOUND, by_affinity, least_live


def test_the_least_busy_worker_takes_the_run():
    assert least_live({"a": 2, "b": 1, "c": 1}) == "b"


def test_equal_beginnings_go_to_one_worker_and_spread_over_all():
    idle = dict.fromkeys("abcd", 0)
    chosen = [by_affinity(idle, str(n).encode()) for n in range(400)]
    assert chosen == [by_affinity(idle, str(n).encode()) for n in range(400)]
    assert min(chosen.count(name) for name in idle) > 60


def test_a_worker_that_is_gone_moves_its_own_keys_alone():
    four, three = dict.fromkeys("abcd", 0), dict.fromkeys("abd", 0)
    moved = [n for n in range(400) if by_affinity(four, str(n).encode()) != by_affinity(three, str(n).encode())]
    assert moved == [n for n in range(400) if by_affinity(four, str(n).encode()) == "c"]


def test_no_worker_gets_far_above_the_mean():
    rng = random.Random(1)
    for _ in range(200):
        live = {name: rng.randrange(20) for name in "abcd"[: rng.randrange(1, 5)]}
        name = by_affinity(live, rng.randbytes(4))
        assert live[name] < BOUND * sum(live.values()) / len(live) + 1


def test_one_popular_key_is_spread_when_it_fills_its_worker():
    live = dict.fromkeys("abcd", 0)
    for _ in range(40):
        live[by_affinity(live, b"the same")] += 1
    assert max(live.values()) <= 14
    assert sum(count > 0 for count in live.values()) >= 3
