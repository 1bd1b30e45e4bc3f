# SPDX-License-Identifier: Apache-2.0
"""Batch selection: completion times, fairness and batch keys."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from triton_omni.backends.diffusion.scheduling import by_priority, select_batch


@dataclass(eq=False)
class FakeRun:
    tokens: int
    steps_left: int
    step_cost: float = 0.0
    arrival_tokens: int = 0
    batch_key: str = ""
    step_bytes: int = 0
    steps_seen: list[int] = field(default_factory=list[int])
    total_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.total_tokens = self.tokens * self.steps_left


class Device:
    """Steps the selected runs and counts tokens and cost, as an engine does: a step costs 1 plus its runs' costs."""

    def __init__(self, overhead: float, max_tokens: int = 1 << 30) -> None:
        self.overhead, self.max_tokens = overhead, max_tokens
        self.now, self.steps, self.cost = 0, 0, 0.0
        self.runs: list[FakeRun] = []
        self.ended: list[tuple[FakeRun, float]] = []

    def add(self, tokens: int, steps: int, batch_key: str = "") -> FakeRun:
        run = FakeRun(tokens, steps, tokens / self.overhead, self.now, batch_key)
        self.runs.append(run)
        return run

    def step(self) -> list[FakeRun]:
        batch = select_batch(by_priority(self.runs, self.now), self.max_tokens, 1 << 40)
        self.steps += 1
        self.cost += 1 + sum(run.step_cost for run in batch)
        for run in batch:
            self.now += run.tokens
            run.steps_left -= 1
            run.steps_seen.append(self.steps)
        self.ended += [(run, self.cost) for run in batch if not run.steps_left]
        self.runs = [run for run in self.runs if run.steps_left]
        return batch


def test_a_batch_holds_what_fits_and_at_least_one_run() -> None:
    device = Device(1e6, 100)
    runs = [device.add(25, 3) for _ in range(5)]
    assert device.step() == runs[:4]
    huge = FakeRun(5000, 1)
    assert select_batch([huge], 100, 0) == [huge]
    assert select_batch([], 100, 0) == []
    fat, *thin = [FakeRun(1, 9, step_bytes=size) for size in (60, 50, 40, 1)]
    assert select_batch([fat, *thin], 100, 100) == [fat, thin[1]]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 12, 32])
@pytest.mark.parametrize("step_cost", [0.05, 0.3, 0.9, 1.0, 1.5, 4.0, 20.0])
def test_batching_never_delays_the_mean_completion_of_a_burst(count: int, step_cost: float) -> None:
    shared, alone = Device(100), Device(100, max_tokens=1)
    for device in (shared, alone):
        for _ in range(count):
            device.add(round(100 * step_cost), 10)
        while device.runs:
            device.step()
    assert sum(at for _, at in shared.ended) <= sum(at for _, at in alone.ended) * 1.0001
    assert shared.cost <= alone.cost * 1.0001
    if count == 4 and step_cost <= 1:
        assert shared.steps == 10  # all four in each step
    if count < 2 * step_cost:
        assert shared.steps == alone.steps


def mean_latency(seed: int, load: float, max_tokens: int) -> float:
    """Of 200 mixed runs with random arrivals; one alone costs 37 on average."""
    rng, device = random.Random(seed), Device(100, max_tokens)
    arrivals: list[tuple[float, int, int]] = []
    moment = 0.0
    for _ in range(200):
        arrivals.append((moment, rng.choice([30, 60, 150, 500]), rng.choice([8, 12, 20])))
        moment += rng.expovariate(load / 37)
    arrived: dict[FakeRun, float] = {}
    while arrivals or device.runs:
        while arrivals and arrivals[0][0] <= device.cost:
            at, tokens, steps = arrivals.pop(0)
            arrived[device.add(tokens, steps)] = at
        if device.runs:
            device.step()
        else:
            device.cost = arrivals[0][0]
    return sum(at - arrived[c] for c, at in device.ended) / len(device.ended)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.9, 1.5])
def test_batching_does_not_delay_mixed_arrivals(load: float) -> None:
    for seed in range(10):
        assert mean_latency(seed, load, 1 << 30) <= mean_latency(seed, load, 1) / 0.97


def test_equal_runs_finish_in_order_of_arrival() -> None:
    device = Device(1e6, 100)
    runs = [device.add(25, 5) for _ in range(9)]
    while device.runs:
        device.step()
    assert [c.steps_seen[-1] for c in runs] == [5, 5, 5, 5, 10, 10, 10, 10, 15]


def test_large_runs_are_not_batched_together_and_small_ones_join_them() -> None:
    device = Device(30)
    first, second, small = device.add(60, 3), device.add(60, 3), device.add(20, 3)
    assert device.step() == [first, small]
    while device.runs:
        device.step()
    assert not set(first.steps_seen) & set(second.steps_seen)
    assert small.steps_seen[-1] <= 3 < second.steps_seen[-1]


def test_small_run_overtakes_a_large_one_within_two_of_its_steps() -> None:
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


def test_stream_of_small_runs_does_not_starve_a_large_one() -> None:
    device = Device(128)
    large = device.add(8000, 20)
    small_tokens = 0
    while large.steps_left:
        while sum(c.tokens for c in device.runs if c is not large) < 512:  # small ones always fill the step
            device.add(66, 12)
        before = device.now
        if large not in device.step():
            small_tokens += device.now - before
    assert small_tokens <= 9 * large.total_tokens  # eight small ones per step slow one another down as much


# --- batch keys ----------------------------------------------------------------------------------------------
def test_runs_with_other_batch_keys_take_no_room_in_a_batch() -> None:
    device = Device(1e6, 100)
    first, *others = [device.add(25, 8, key) for key in ("ink", "", "", "", "ink", "ink", "ink", "ink")]
    assert device.step() == [first, *others[3:6]]


def test_batch_keys_run_in_order_of_arrival() -> None:
    device = Device(1e6, 100)
    ink = [device.add(25, 5, "ink") for _ in range(4)]
    chalk = [device.add(25, 5, "chalk") for _ in range(2)]
    late = [device.add(25, 5, "ink") for _ in range(4)]
    while device.runs:
        device.step()
    assert [c.steps_seen[-1] for c in (*ink, *chalk, *late)] == [5] * 4 + [10] * 2 + [15] * 4


@pytest.mark.parametrize("keys", [2, 4])
def test_stream_of_one_batch_key_does_not_starve_another(keys: int) -> None:
    device = Device(1e6, 512)
    lonely = [device.add(66, 12, f"lora {i}") for i in range(keys - 1)]
    steps = 0
    while any(c.steps_left for c in lonely):
        while sum(c.tokens for c in device.runs if not c.batch_key) < 1024:
            device.add(66, 12)
        device.step()
        steps += 1
    assert steps <= 12 * (keys - 1) * 8
