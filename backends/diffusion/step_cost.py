# SPDX-License-Identifier: Apache-2.0
"""What a picture adds to a step on this device, over what any step costs: its weight (see fairness.py). No torch here.

A step costs a fixed part (starting the kernels, what is done per row) and so much for each token, more where
attention is long or the device is full. Two pictures of equal size in one step show both: the second adds its
*marginal* cost, and sharing saves twice the one minus both.

A gain that was not measured is not predicted. Between two sizes the line through both holds: the cost of attention
bends upwards, so the line is above it. Smaller pictures than the first weigh what that one weighs, and larger ones than
the last at which sharing saved something go alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

MARGIN = 0.8  # measurements differ by so much; a run that is near the line goes alone
MANY_TOKENS = 1 << 40


class Measure(NamedTuple):
    """Seconds of a step with one picture of so many tokens, and with two of them."""

    tokens: int
    alone_s: float
    pair_s: float


@dataclass(frozen=True)
class Weights:
    """(tokens of a picture with its prompt, weight) as measured, by tokens; weights do not fall."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of_overhead(cls, tokens: int) -> Weights:
        """For a device whose steps cost as much as so many tokens, whatever is in them."""
        return cls(((0, 0.0), (MANY_TOKENS, MANY_TOKENS / tokens)))

    @classmethod
    def of_measures(cls, measures: Iterable[Measure]) -> Weights:
        """From measures by growing tokens. What sharing saves is taken for the least that was seen so far."""
        points: list[tuple[float, float]] = []
        saved_s, weight = math.inf, 0.0
        for tokens, alone_s, pair_s in measures:
            saved_s = min(saved_s, MARGIN * (2 * alone_s - pair_s))
            if saved_s <= 0:
                break
            weight = max(weight, (pair_s - alone_s) / saved_s)
            points.append((tokens, weight))
        return cls(tuple(points))

    def __call__(self, tokens: float) -> float:
        if self.points and tokens <= self.points[0][0]:
            return self.points[0][1]
        for (low, below), (high, above) in pairwise(self.points):
            if tokens <= high:
                return below + (above - below) * (tokens - low) / (high - low)
        return math.inf

    def __str__(self) -> str:
        return ", ".join(f"{tokens:.0f} tokens {weight:.2f}" for tokens, weight in self.points) or "too much to share"
