# SPDX-License-Identifier: Apache-2.0
"""The step cost between and beyond measured sizes is never below the true cost."""

from __future__ import annotations

import math
import random

import pytest

from tests.unit.diffusion.test_scheduling import FakeRun
from triton_omni.backends.diffusion.scheduling import select_batch
from triton_omni.backends.diffusion.step_cost import StepCost, StepTiming


def cost(lengths: list[int], fixed: float, linear: float, square: float) -> float:
    """Seconds of a step with images of these lengths in tokens; attention is quadratic."""
    return fixed + sum(linear * t + square * t * t for t in lengths)


def device(seed: int) -> tuple[float, float, float]:
    rng = random.Random(seed)
    fixed = rng.uniform(1e-3, 1e-2)
    return fixed, fixed / rng.uniform(30, 3000), fixed / rng.uniform(100, 3000) ** 2


def measured(constants: tuple[float, float, float], tokens: tuple[int, ...]) -> StepCost:
    return StepCost.from_timings(StepTiming(t, cost([t], *constants), cost([t, t], *constants)) for t in tokens)


SIZES = (26, 74, 266, 1034, 4106)


@pytest.mark.parametrize("sizes", [1, 2, 3, 5])
def test_step_cost_is_never_below_the_true_cost(sizes: int) -> None:
    for seed in range(20):
        constants = device(seed)
        step_cost = measured(constants, SIZES[:sizes])
        for tokens in range(1, 20_000, 7):
            adds = cost([tokens], *constants) - constants[0]
            assert step_cost(tokens) >= adds / constants[0], f"device {seed}, {tokens} tokens"
            assert (step_cost(tokens) == math.inf) == (tokens > SIZES[sizes - 1])


def test_images_larger_than_measured_are_never_batched() -> None:
    step_cost = measured(device(0), SIZES[:1])
    queue = [FakeRun(27, 10, step_cost(27)) for _ in range(500)]
    assert select_batch(queue, 1 << 30, 1 << 40) == queue[:1]
    small = FakeRun(20, 10, step_cost(20))
    assert select_batch([*queue, small], 1 << 30, 1 << 40) == [queue[0], small]


def test_sizes_at_which_batching_saves_nothing_and_larger_ones_are_never_batched() -> None:
    step_cost = StepCost.from_timings([StepTiming(26, 1.0, 1.2), StepTiming(74, 2.0, 4.1), StepTiming(266, 5.0, 5.1)])
    assert step_cost(26) < 1
    assert step_cost(75) == step_cost(266) == step_cost(300) == math.inf


def test_step_cost_does_not_fall_with_an_outlier() -> None:
    step_cost = StepCost.from_timings([StepTiming(26, 1.0, 1.5), StepTiming(74, 1.2, 1.3)])
    assert step_cost(74) >= step_cost(26) > 0


def test_configured_overhead_gives_a_cost_proportional_to_tokens() -> None:
    step_cost = StepCost.from_overhead(100)
    assert step_cost(50) == pytest.approx(0.5) and step_cost(1_000_000) == pytest.approx(10_000)
