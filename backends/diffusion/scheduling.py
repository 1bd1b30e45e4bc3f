# SPDX-License-Identifier: Apache-2.0
"""Which runs take part in the next step. Pure arithmetic on token counts.

Every run has a *need*: how long it has been here over all the work it is, both counted in tokens that the engine
puts through the model. The neediest go first, as many as one forward may hold. So

* equal runs finish one after the other in order of arrival, instead of all of them late;
* a small run that comes while a large one is drawn needs more after a step or two, and overtakes;
* a large run's need grows while small ones pass, so a steady stream of them slows it down by about as much as they
  slow down one another, and no more.

Sharing a step saves its fixed cost and delays everybody in it. A run's *weight* is what its tokens add to a step over
that fixed cost. If n runs of weight w go m at a time, the average one is over after (1/m + w) (n + m) / 2: least where
m m w = n, and no later than one by one as long as m w <= n. So two runs share if one adds no more than a step costs
anyway, a long queue shares more, and runs that keep the device busy by themselves (w much above 1) go one by one.

Not every two runs can share (a forward wears one LoRA): those that can have one *manner*. The neediest run says which
manner a step has; n still counts all runs that there is memory for, because they all wait for what a step costs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar


class Claim(Protocol):
    """What is asked of a run here."""

    @property
    def tokens(self) -> int:
        """Tokens of one step, all pictures and guidance branches."""
        ...

    @property
    def step_bytes(self) -> int:
        """Bytes its part of a step needs."""
        ...

    @property
    def weight(self) -> float:
        """What these tokens add to a step, over the fixed cost of a step."""
        ...

    @property
    def work(self) -> int:
        """Tokens of all its steps, done or not."""
        ...

    @property
    def came_at(self) -> int:
        """The engine's count of tokens when the run was opened."""
        ...

    @property
    def manner(self) -> Hashable:
        """Equal for runs that may share a forward."""
        ...


C = TypeVar("C", bound=Claim)


def need(claim: Claim, now: int) -> float:
    """0 for a run that just came; grows with time, faster for small runs."""
    return (now - claim.came_at) / claim.work


THRIFT = 4
"""Steps hold up to sqrt(THRIFT) times as many runs as would make the average earliest: with 32 runs of weight 0.5, a
tenth more throughput for a twelfth of the mean latency."""


def ranked(claims: Sequence[C], now: int) -> list[C]:
    """The neediest first; equal needs keep the order of arrival."""
    return sorted(claims, key=lambda c: -need(c, now))


def choose(claims: Sequence[C], now: int, most_tokens: int, most_bytes: int) -> list[C]:
    """The neediest claim, whatever it takes, and by need those of its manner that make the average earlier, within
    `most_tokens` and `most_bytes`."""
    if not claims:
        return []
    first, *others = ranked(claims, now)
    chosen, tokens, step_bytes = [first], first.tokens, first.step_bytes
    for claim in others:
        pays = (len(chosen) + 1) * claim.weight * max(1, len(chosen) / THRIFT) <= len(claims)
        fits = tokens + claim.tokens <= most_tokens and step_bytes + claim.step_bytes <= most_bytes
        if claim.manner == first.manner and pays and fits:
            chosen.append(claim)
            tokens, step_bytes = tokens + claim.tokens, step_bytes + claim.step_bytes
    return chosen
