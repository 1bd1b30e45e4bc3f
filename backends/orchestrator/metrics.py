# SPDX-License-Identifier: Apache-2.0
"""Counters of one orchestrator. Plain numbers: the Triton room publishes them, tests reconcile them."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.core.request import End

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass
class Histogram:
    """Cumulative buckets in seconds, as Prometheus counts them."""

    counts: list[int] = field(default_factory=lambda: [0] * len(BUCKETS_S))
    total: int = 0
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.total += 1
        self.sum_s += seconds
        for i, bound in enumerate(BUCKETS_S):
            if seconds <= bound:
                self.counts[i] += 1


@dataclass
class Metrics:
    """What happened to requests, by pipeline operation where it matters."""

    requests: dict[str, int] = field(default_factory=dict[str, int])
    """Outcome (completed, cancelled, or an error code) → requests."""
    first_output_s: dict[str, Histogram] = field(default_factory=dict[str, Histogram])
    """Output name → time from arrival to its first piece."""
    pieces: dict[str, int] = field(default_factory=dict[str, int])
    """Output name → pieces sent."""
    queue_s: Histogram = field(default_factory=Histogram)
    total_s: Histogram = field(default_factory=Histogram)
    usage: dict[str, float] = field(default_factory=dict[str, float])
    opened: dict[str, int] = field(default_factory=dict[str, int])
    """Stage → runs opened."""
    lost: dict[str, int] = field(default_factory=dict[str, int])
    """Stage → runs whose worker died."""

    def ended(self, end: End, total_s: float) -> None:
        """Count one end."""
        outcome = end.error.code if end.error is not None else end.outcome.value
        self.requests[outcome] = self.requests.get(outcome, 0) + 1
        self.total_s.observe(total_s)
        for name, count in end.usage.items():
            self.usage[name] = self.usage.get(name, 0) + count

    def refused(self, code: str) -> None:
        """Count a request that ended before it was admitted."""
        self.requests[code] = self.requests.get(code, 0) + 1

    def sent(self, output: str, index: int, since_arrival_s: float) -> None:
        """Count one piece of output."""
        self.pieces[output] = self.pieces.get(output, 0) + 1
        if index == 0:
            self.first_output_s.setdefault(output, Histogram()).observe(since_arrival_s)
