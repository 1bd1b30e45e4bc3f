# SPDX-License-Identifier: Apache-2.0
"""Our numbers on Triton's metrics page. Families are made in `initialize`; the server merges equal names.

Measured on 24.10: a metric call holds the GIL while it waits for the server, and the server stops answering as soon as
it unloads a model: a call at that moment freezes the stub. Triton unloads only models without open requests, so numbers
are published by the sender of an open request and at no other time: every 5 s, and before its FINAL. (Nor in
`initialize`: with some hundred calls there, 3 of 28 servers under heavy load ended with a lock_exception of the Python
backend.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import triton_python_backend_utils as pb

from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.records import State
from triton_omni.backends.orchestrator.driver import Orchestrator
from triton_omni.backends.orchestrator.metrics import Family, Histogram, HistogramFamily

PUBLISH_S = 1.0


class _Samples:
    """A family of the server's, whose metrics are made per label set on first use and follow absolute values."""

    def __init__(self, name: str, about: str, counter: bool) -> None:
        kind = pb.MetricFamily.COUNTER if counter else pb.MetricFamily.GAUGE
        self._family = pb.MetricFamily(name=name, description=about, kind=kind)
        self._counter = counter
        self._metrics: dict[tuple[str, ...], pb.Metric] = {}
        self._seen: dict[tuple[str, ...], float] = {}

    def show(self, value: float, labels: Mapping[str, str]) -> None:
        """Show `value`; a counter only ever grows."""
        key = tuple(labels.values())
        if key not in self._metrics:
            self._metrics[key] = self._family.Metric(labels=dict(labels))
            self._seen[key] = 0.0
        if value == self._seen[key]:
            return
        if self._counter:
            self._metrics[key].increment(value - self._seen[key])
        else:
            self._metrics[key].set(value)
        self._seen[key] = value


class _Numbers:
    """One of our families on the page."""

    def __init__(self, family: Family) -> None:
        self._source = family
        self._samples = _Samples(family.name, family.about, family.kind == "counter")

    def publish(self, own: Mapping[str, str]) -> None:
        for key, value in list(self._source.values.items()):
            self._samples.show(value, {**own, **dict(zip(self._source.labels, key, strict=True))})


class _Histograms:
    """A Prometheus histogram out of three counter families: 24.10 has no custom histograms."""

    def __init__(self, family: HistogramFamily) -> None:
        self._source = family
        self._bucket, self._count, self._sum = (
            _Samples(f"{family.name}_{part}", family.about, True) for part in ("bucket", "count", "sum")
        )

    def publish(self, own: Mapping[str, str]) -> None:
        for key, histogram in list(self._source.values.items()):
            self._publish(histogram, {**own, **dict(zip(self._source.labels, key, strict=True))})

    def _publish(self, histogram: Histogram, labels: Mapping[str, str]) -> None:
        cumulative = histogram.cumulative
        for bound, count in zip((*map("{:g}".format, histogram.bounds), "+Inf"), cumulative, strict=True):
            self._bucket.show(count, {**labels, "le": bound})
        self._count.show(cumulative[-1], labels)
        self._sum.show(histogram.sum, labels)


class MetricsPublisher:
    """Families of one model, published at most once a second, and always when nothing is running."""

    def __init__(self, families: Sequence[Family | HistogramFamily], **own: str) -> None:
        self._own = own
        self._shown = [_Numbers(f) if isinstance(f, Family) else _Histograms(f) for f in families]
        self._next_s = 0.0
        self._lock = threading.Lock()

    def publish(self, is_working: Callable[[], bool]) -> None:
        """Show what is new; `is_working` may set gauges first. Called by several threads."""
        with self._lock:  # also around the gauges: an older count must not overwrite a newer one
            now = time.monotonic()
            if is_working() and now < self._next_s:
                return
            self._next_s = now + PUBLISH_S
            for shown in self._shown:
                shown.publish(self._own)


class OrchestratorMetrics:
    """An orchestrator's numbers."""

    def __init__(self, pipeline: str, orchestrator: Orchestrator) -> None:
        self._source = orchestrator
        self._publisher = MetricsPublisher(orchestrator.metrics.families, pipeline=pipeline)

    def publish(self) -> None:
        """Publish what has changed; the last running request always does."""
        self._publisher.publish(self._count)

    def _count(self) -> bool:
        working = [live for live in list(self._source.requests.values()) if live.machine.outcome is None]
        admitted = sum(live.admitted_s is not None for live in working)
        self._source.metrics.running.set(admitted)
        self._source.metrics.waiting.set(len(working) - admitted)
        return bool(working)


class StageMetrics:
    """Numbers of a stage's workers by their latest pings. A restarted worker counts from zero, we do not."""

    def __init__(self, pipeline: str, stage: str) -> None:
        self._counters = {
            "steps": Family("omni_stage_steps_total", "counter", "Engine steps"),
            "step_runs": Family("omni_stage_step_runs_total", "counter", "Runs that engine steps had something for"),
            "step_s": Family("omni_stage_step_seconds_total", "counter", "Seconds spent in engine steps"),
            "turn_s": Family("omni_stage_turn_seconds_total", "counter", "Seconds the worker's loop worked"),
        }
        self._live = Family("omni_stage_runs_live", "gauge", "Runs in the worker", ("worker",))
        self._workers = Family("omni_stage_workers", "gauge", "Workers by state", ("state",))
        self._restarts = Family("omni_stage_worker_restarts_total", "counter", "Starts of a worker after its first")
        self._moved = Family("omni_stage_moved_runs_total", "counter", "Runs that another worker took after a death")
        self._last: dict[tuple[str, str], float] = {}
        shown = [*self._counters.values(), self._live, self._workers, self._restarts, self._moved]
        self._publisher = MetricsPublisher(shown, pipeline=pipeline, stage=stage)

    def note(self, worker: str, ping: msg.PingMessage) -> None:
        """Keep what a worker's ping brings."""
        for key, family in self._counters.items():
            value, last = ping.numbers.get(key, 0.0), self._last.get((worker, key), 0.0)
            family.add(value - last if value >= last else value)
            self._last[worker, key] = value
        self._live.set(ping.live, worker)

    def count(self, states: Sequence[State], restarts: int, moved: int) -> None:
        """Keep the state of each worker, and how often workers were restarted and runs moved, in all."""
        for state in get_args(State):
            self._workers.set(states.count(state), state)
        self._restarts.set(restarts)
        self._moved.set(moved)

    def publish(self) -> None:
        """Publish what has changed; the last run always does."""
        self._publisher.publish(lambda: any(self._live.values.values()))
