# SPDX-License-Identifier: Apache-2.0
"""Marginal cost of an image in a step on this device, in units of the fixed cost of a step (scheduling.py). No torch.

A step has a fixed cost (kernel launches, work per row) and a cost per token, which grows where attention is long or the
device is full. Timing steps with one image and with two of equal size shows both: the second image adds the marginal
cost, and sharing a step saves twice the first time minus the second.

Savings that were not measured are not predicted. Between two measured sizes the cost is interpolated linearly, which
is an upper bound because the cost of attention is convex. Sizes below the first measurement cost what that one costs;
sizes above the last one at which sharing saved time are not batched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

MARGIN = 0.8  # allowance for noise: runs near break-even are not batched
MANY_TOKENS = 1 << 40


class StepTiming(NamedTuple):
    """Seconds of a step with one image of `tokens` tokens, and with two of them."""

    tokens: int
    alone_s: float
    pair_s: float


@dataclass(frozen=True)
class StepCost:
    """Piecewise linear step cost: points (tokens of an image with its prompt, cost), both non-decreasing."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def from_overhead(cls, tokens: int) -> StepCost:
        """For a device whose fixed cost of a step equals the cost of `tokens` tokens."""
        return cls(((0, 0.0), (MANY_TOKENS, MANY_TOKENS / tokens)))

    @classmethod
    def from_timings(cls, timings: Iterable[StepTiming]) -> StepCost:
        """From timings by growing tokens. The saving at a size is the least seen up to that size."""
        points: list[tuple[float, float]] = []
        saved_s, cost = math.inf, 0.0
        for tokens, alone_s, pair_s in timings:
            saved_s = min(saved_s, MARGIN * (2 * alone_s - pair_s))
            if saved_s <= 0:
                break
            cost = max(cost, (pair_s - alone_s) / saved_s)
            points.append((tokens, cost))
        return cls(tuple(points))

    def __call__(self, tokens: float) -> float:
        if self.points and tokens <= self.points[0][0]:
            return self.points[0][1]
        for (low, below), (high, above) in pairwise(self.points):
            if tokens <= high:
                return below + (above - below) * (tokens - low) / (high - low)
        return math.inf

    def __str__(self) -> str:
        return ", ".join(f"{tokens:.0f} tokens {cost:.2f}" for tokens, cost in self.points) or "batching never pays"
