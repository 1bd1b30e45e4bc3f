# SPDX-License-Identifier: Apache-2.0
"""Who steps next: bounds on waiting, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.diffusion.fairness import choose


@dataclass(eq=False)
class Plain:
    tokens: int
    steps_left: int
    came_at: int = 0
    steps_seen: list[int] = field(default_factory=list[int])
    work: int = field(init=False)

    def __post_init__(self) -> None:
        self.work = self.tokens * self.steps_left


class Device:
    """Steps the chosen claims and counts tokens, as the engine does."""

    def __init__(self, budget: int) -> None:
        self.budget, self.now, self.steps = budget, 0, 0
        self.claims: list[Plain] = []

    def add(self, tokens: int, steps: int) -> Plain:
        claim = Plain(tokens, steps, self.now)
        self.claims.append(claim)
        return claim

    def step(self) -> list[Plain]:
        chosen = choose(self.claims, self.now, self.budget)
        self.steps += 1
        for claim in chosen:
            self.now += claim.tokens
            claim.steps_left -= 1
            claim.steps_seen.append(self.steps)
        self.claims = [c for c in self.claims if c.steps_left]
        return chosen


def test_a_step_holds_what_fits_and_never_nothing() -> None:
    device = Device(100)
    claims = [device.add(25, 3) for _ in range(5)]
    assert device.step() == claims[:4]
    huge = Plain(5000, 1)
    assert choose([huge], 0, 100) == [huge]
    assert choose([], 0, 100) == []


def test_equal_jobs_finish_in_order_of_arrival() -> None:
    device = Device(100)
    claims = [device.add(25, 5) for _ in range(9)]
    while device.claims:
        device.step()
    assert [c.steps_seen[-1] for c in claims] == [5, 5, 5, 5, 10, 10, 10, 10, 15]


def test_large_runs_never_share_a_step_and_small_ones_ride_along() -> None:
    device = Device(100)
    first, second, small = device.add(40, 3), device.add(40, 3), device.add(20, 3)
    assert device.step() == [first, small]
    while device.claims:
        device.step()
    assert not set(first.steps_seen) & set(second.steps_seen)
    assert small.steps_seen[-1] <= 3 < second.steps_seen[-1]


def test_a_small_job_overtakes_a_large_one_within_two_of_its_steps() -> None:
    for large_steps_done in range(1, 45):
        device = Device(512)
        device.add(8000, 50)
        for _ in range(large_steps_done):
            device.step()
        small = device.add(66, 12)
        waited = 0
        while small not in device.step():
            waited += 1
        assert waited <= 2, f"after {large_steps_done} large steps"


def test_a_stream_of_small_jobs_does_not_starve_a_large_one() -> None:
    device = Device(512)
    large = device.add(8000, 20)
    work_of_small = 0
    while large.steps_left:
        while sum(c.tokens for c in device.claims if c is not large) < 512:  # small ones always fill the step
            device.add(66, 12)
        before = device.now
        if large not in device.step():
            work_of_small += device.now - before
    assert work_of_small <= 9 * large.work  # eight small ones share a step: they slow one another as much
