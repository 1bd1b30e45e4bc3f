# SPDX-License-Identifier: Apache-2.0
"""Who steps next: bounds on waiting, in numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from triton_omni.backends.diffusion.scheduling import choose


@dataclass(eq=False)
class Plain:
    tokens: int
    steps_left: int
    weight: float = 0.0
    came_at: int = 0
    manner: str = ""
    step_bytes: int = 0
    steps_seen: list[int] = field(default_factory=list[int])
    work: int = field(init=False)

    def __post_init__(self) -> None:
        self.work = self.tokens * self.steps_left


class Device:
    """Steps the chosen claims and counts tokens and cost, as an engine does: a step costs 1 and the weights in it."""

    def __init__(self, overhead: float, most_tokens: int = 1 << 30) -> None:
        self.overhead, self.most_tokens = overhead, most_tokens
        self.now, self.steps, self.cost = 0, 0, 0.0
        self.claims: list[Plain] = []
        self.ended: list[tuple[Plain, float]] = []

    def add(self, tokens: int, steps: int, manner: str = "") -> Plain:
        claim = Plain(tokens, steps, tokens / self.overhead, self.now, manner)
        self.claims.append(claim)
        return claim

    def step(self) -> list[Plain]:
        chosen = choose(self.claims, self.now, self.most_tokens, 1 << 40)
        self.steps += 1
        self.cost += 1 + sum(c.weight for c in chosen)
        for claim in chosen:
            self.now += claim.tokens
            claim.steps_left -= 1
            claim.steps_seen.append(self.steps)
        self.ended += [(c, self.cost) for c in chosen if not c.steps_left]
        self.claims = [c for c in self.claims if c.steps_left]
        return chosen


def test_a_step_holds_what_fits_and_never_nothing() -> None:
    device = Device(1e6, 100)
    claims = [device.add(25, 3) for _ in range(5)]
    assert device.step() == claims[:4]
    huge = Plain(5000, 1)
    assert choose([huge], 0, 100, 0) == [huge]
    assert choose([], 0, 100, 0) == []
    fat, *thin = [Plain(1, 9, step_bytes=size) for size in (60, 50, 40, 1)]
    assert choose([fat, *thin], 0, 100, 100) == [fat, thin[1]]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 12, 32])
@pytest.mark.parametrize("weight", [0.05, 0.3, 0.9, 1.0, 1.5, 4.0, 20.0])
def test_sharing_never_makes_a_burst_later_on_average(count: int, weight: float) -> None:
    shared, alone = Device(100), Device(100, most_tokens=1)
    for device in (shared, alone):
        for _ in range(count):
            device.add(round(100 * weight), 10)
        while device.claims:
            device.step()
    assert sum(at for _, at in shared.ended) <= sum(at for _, at in alone.ended) * 1.0001
    assert shared.cost <= alone.cost * 1.0001
    if count == 4 and weight <= 1:
        assert shared.steps == 10  # all four in each step
    if count < 2 * weight:
        assert shared.steps == alone.steps


def mean_latency(seed: int, load: float, most_tokens: int) -> float:
    """Of 200 mixed runs that come at random; what one costs alone is 37 on average."""
    rng, device = random.Random(seed), Device(100, most_tokens)
    arrivals: list[tuple[float, int, int]] = []
    moment = 0.0
    for _ in range(200):
        arrivals.append((moment, rng.choice([30, 60, 150, 500]), rng.choice([8, 12, 20])))
        moment += rng.expovariate(load / 37)
    came: dict[Plain, float] = {}
    while arrivals or device.claims:
        while arrivals and arrivals[0][0] <= device.cost:
            at, tokens, steps = arrivals.pop(0)
            came[device.add(tokens, steps)] = at
        if device.claims:
            device.step()
        else:
            device.cost = arrivals[0][0]
    return sum(at - came[c] for c, at in device.ended) / len(device.ended)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.9, 1.5])
def test_sharing_makes_mixed_arrivals_no_later(load: float) -> None:
    for seed in range(10):
        assert mean_latency(seed, load, 1 << 30) <= mean_latency(seed, load, 1) / 0.97


def test_equal_claims_finish_in_order_of_arrival() -> None:
    device = Device(1e6, 100)
    claims = [device.add(25, 5) for _ in range(9)]
    while device.claims:
        device.step()
    assert [c.steps_seen[-1] for c in claims] == [5, 5, 5, 5, 10, 10, 10, 10, 15]


def test_large_runs_never_share_a_step_and_small_ones_ride_along() -> None:
    device = Device(30)
    first, second, small = device.add(60, 3), device.add(60, 3), device.add(20, 3)
    assert device.step() == [first, small]
    while device.claims:
        device.step()
    assert not set(first.steps_seen) & set(second.steps_seen)
    assert small.steps_seen[-1] <= 3 < second.steps_seen[-1]


def test_a_small_claim_overtakes_a_large_one_within_two_of_its_steps() -> None:
    for large_steps_done in range(1, 45):
        device = Device(128)
        device.add(8000, 50)
        for _ in range(large_steps_done):
            device.step()
        small = device.add(66, 12)
        waited = 0
        while small not in device.step():
            waited += 1
        assert waited <= 2, f"after {large_steps_done} large steps"


def test_a_stream_of_small_claims_does_not_starve_a_large_one() -> None:
    device = Device(128)
    large = device.add(8000, 20)
    work_of_small = 0
    while large.steps_left:
        while sum(c.tokens for c in device.claims if c is not large) < 512:  # small ones always fill the step
            device.add(66, 12)
        before = device.now
        if large not in device.step():
            work_of_small += device.now - before
    assert work_of_small <= 9 * large.work  # eight small ones share a step: they slow one another as much


# --- runs that cannot share ----------------------------------------------------------------------------------
def test_a_step_of_one_manner_is_as_full_as_it_may_be() -> None:
    device = Device(1e6, 100)
    first, *others = [device.add(25, 8, manner) for manner in ("ink", "", "", "", "ink", "ink", "ink", "ink")]
    assert device.step() == [first, *others[3:6]]  # others that wait take none of its room


def test_manners_go_in_order_of_arrival() -> None:
    device = Device(1e6, 100)
    ink = [device.add(25, 5, "ink") for _ in range(4)]
    chalk = [device.add(25, 5, "chalk") for _ in range(2)]
    late = [device.add(25, 5, "ink") for _ in range(4)]
    while device.claims:
        device.step()
    assert [c.steps_seen[-1] for c in (*ink, *chalk, *late)] == [5] * 4 + [10] * 2 + [15] * 4


@pytest.mark.parametrize("manners", [2, 4])
def test_a_stream_of_one_manner_does_not_starve_another(manners: int) -> None:
    device = Device(1e6, 512)
    lonely = [device.add(66, 12, f"lora {i}") for i in range(manners - 1)]
    steps = 0
    while any(c.steps_left for c in lonely):
        while sum(c.tokens for c in device.claims if not c.manner) < 1024:
            device.add(66, 12)
        device.step()
        steps += 1
    assert steps <= 12 * (manners - 1) * 8
