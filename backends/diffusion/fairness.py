# SPDX-License-Identifier: Apache-2.0
"""Which runs take part in the next step. Pure arithmetic on token counts.

Every run has a *need*: how long it has been here over all the work it is, both counted in tokens that the engine
puts through the model. The neediest go first, as many as one forward may hold. So

* equal runs finish one after the other in order of arrival, instead of all of them late;
* a small run that comes while a large one is drawn needs more after a step or two, and overtakes;
* a large run's need grows while small ones pass, so a steady stream of them slows it down by about as much as they
  slow down one another, and no more.

Sharing a step saves its fixed cost and delays everybody in it. A run whose own tokens cost less than that fixed cost
makes the average earlier by joining others, a larger one makes it later (two equal runs: a + 2b for both, against
a + b and 2a + 2b). So only small runs join; a large one leads its step or waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Claim(Protocol):
    """What is asked of a run here."""

    @property
    def tokens(self) -> int:
        """Tokens of one step, all pictures and guidance branches."""
        ...

    @property
    def work(self) -> int:
        """Tokens of all its steps, done or not."""
        ...

    @property
    def came_at(self) -> int:
        """The engine's count of tokens when the run was opened."""
        ...


JOIN = 4
"""A run joins others if it has at most this part of a step's budget; calibrate.py measures the budget so that this
is where the run's tokens cost as much as a step's fixed part."""

C = TypeVar("C", bound=Claim)


def need(claim: Claim, now: int) -> float:
    """0 for a run that just came; grows with time, faster for small runs."""
    return (now - claim.came_at) / claim.work


def choose(claims: Sequence[C], now: int, budget: int) -> list[C]:
    """The neediest claim, and small ones by need as long as all fit into `budget` tokens."""
    ranked = sorted(claims, key=lambda c: -need(c, now))  # stable: equal needs keep the order of arrival
    chosen: list[C] = []
    room = budget
    for claim in ranked:
        if not chosen or claim.tokens <= min(room, budget // JOIN):
            chosen.append(claim)
            room -= claim.tokens
    return chosen
