# SPDX-License-Identifier: Apache-2.0
"""Who steps next: bounds on waiting, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.diffusion.fairness import choose


@dataclass(eq=False)
class Job:
    tokens: int
    steps_left: int
    came_at: int = 0
    steps_seen: list[int] = field(default_factory=list[int])
    work: int = field(init=False)

    def __post_init__(self) -> None:
        self.work = self.tokens * self.steps_left


class Device:
    """Steps the chosen jobs and counts tokens, as the engine does."""

    def __init__(self, budget: int) -> None:
        self.budget, self.now, self.steps = budget, 0, 0
        self.jobs: list[Job] = []

    def add(self, tokens: int, steps: int) -> Job:
        job = Job(tokens, steps, self.now)
        self.jobs.append(job)
        return job

    def step(self) -> list[Job]:
        chosen = choose(self.jobs, self.now, self.budget)
        self.steps += 1
        for job in chosen:
            self.now += job.tokens
            job.steps_left -= 1
            job.steps_seen.append(self.steps)
        self.jobs = [j for j in self.jobs if j.steps_left]
        return chosen


def test_a_step_holds_what_fits_and_never_nothing() -> None:
    device = Device(100)
    jobs = [device.add(25, 3) for _ in range(5)]
    assert device.step() == jobs[:4]
    huge = Job(5000, 1)
    assert choose([huge], 0, 100) == [huge]
    assert choose([], 0, 100) == []


def test_equal_jobs_finish_in_order_of_arrival() -> None:
    device = Device(100)
    jobs = [device.add(25, 5) for _ in range(9)]
    while device.jobs:
        device.step()
    assert [j.steps_seen[-1] for j in jobs] == [5, 5, 5, 5, 10, 10, 10, 10, 15]


def test_large_runs_never_share_a_step_and_small_ones_ride_along() -> None:
    device = Device(100)
    first, second, small = device.add(40, 3), device.add(40, 3), device.add(20, 3)
    assert device.step() == [first, small]
    while device.jobs:
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
        while sum(j.tokens for j in device.jobs if j is not large) < 512:  # small ones always fill the step
            device.add(66, 12)
        before = device.now
        if large not in device.step():
            work_of_small += device.now - before
    assert work_of_small <= 9 * large.work  # eight small ones share a step: they slow one another as much
