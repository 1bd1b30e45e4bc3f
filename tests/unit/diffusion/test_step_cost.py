# SPDX-License-Identifier: Apache-2.0
"""What was measured holds for what was not: no picture is thought to be lighter than it is."""

from __future__ import annotations

import math
import random

import pytest

from tests.unit.diffusion.test_scheduling import Plain
from triton_omni.backends.diffusion.scheduling import choose
from triton_omni.backends.diffusion.step_cost import Measure, Weights


def cost(lengths: list[int], fixed: float, linear: float, square: float) -> float:
    """Seconds of a step with pictures of so many tokens each: attention grows with the square."""
    return fixed + sum(linear * t + square * t * t for t in lengths)


def device(seed: int) -> tuple[float, float, float]:
    rng = random.Random(seed)
    fixed = rng.uniform(1e-3, 1e-2)
    return fixed, fixed / rng.uniform(30, 3000), fixed / rng.uniform(100, 3000) ** 2


def measured(constants: tuple[float, float, float], tokens: tuple[int, ...]) -> Weights:
    return Weights.of_measures(Measure(t, cost([t], *constants), cost([t, t], *constants)) for t in tokens)


SIZES = (26, 74, 266, 1034, 4106)


@pytest.mark.parametrize("tried", [1, 2, 3, 5])
def test_no_picture_weighs_less_than_it_costs(tried: int) -> None:
    for seed in range(20):
        constants = device(seed)
        weights = measured(constants, SIZES[:tried])
        for tokens in range(1, 20_000, 7):
            adds = cost([tokens], *constants) - constants[0]
            assert weights(tokens) >= adds / constants[0], f"device {seed}, {tokens} tokens"
            assert (weights(tokens) == math.inf) == (tokens > SIZES[tried - 1])


def test_larger_pictures_than_were_tried_go_alone_however_long_the_queue() -> None:
    weights = measured(device(0), SIZES[:1])
    queue = [Plain(27, 10, weights(27)) for _ in range(500)]
    assert choose(queue, 0, 1 << 30, 1 << 40) == queue[:1]
    small = Plain(20, 10, weights(20))
    assert choose([*queue, small], 0, 1 << 30, 1 << 40) == [queue[0], small]


def test_a_size_at_which_sharing_saves_nothing_is_never_shared_nor_is_a_larger_one() -> None:
    weights = Weights.of_measures([Measure(26, 1.0, 1.2), Measure(74, 2.0, 4.1), Measure(266, 5.0, 5.1)])
    assert weights(26) < 1
    assert weights(75) == weights(266) == weights(300) == math.inf


def test_step_cost_do_not_fall_with_a_measurement_that_was_lucky() -> None:
    weights = Weights.of_measures([Measure(26, 1.0, 1.5), Measure(74, 1.2, 1.3)])
    assert weights(74) >= weights(26) > 0


def test_a_deploy_value_is_in_proportion_to_tokens() -> None:
    weights = Weights.of_overhead(100)
    assert weights(50) == pytest.approx(0.5) and weights(1_000_000) == pytest.approx(10_000)
