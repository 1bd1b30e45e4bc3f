# SPDX-License-Identifier: Apache-2.0
"""Our numbers on Triton's metrics page. Families are made in `initialize`; the server merges equal names.

Measured on 24.10: a metric call holds the GIL while it waits for the server, and the server stops answering as
soon as it unloads a model: a call at that moment freezes the stub for ever. Triton unloads only models without
open requests, so numbers are published just before a request's FINAL and at no other time.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import triton_python_backend_utils as pb

from backends.orchestrator.driver import Orchestrator
from backends.orchestrator.metrics import BUCKETS_S, Histogram

PUBLISH_S = 1.0


class _Family:
    """A family whose metrics are made per label set on first use and follow absolute values."""

    def __init__(self, name: str, description: str, counter: bool) -> None:
        kind = pb.MetricFamily.COUNTER if counter else pb.MetricFamily.GAUGE
        self._family = pb.MetricFamily(name=name, description=description, kind=kind)
        self._counter = counter
        self._metrics: dict[tuple[tuple[str, str], ...], Any] = {}
        self._seen: dict[tuple[tuple[str, str], ...], float] = {}

    def set(self, value: float, **labels: str) -> None:
        """Show `value`; a counter only ever grows."""
        key = tuple(sorted(labels.items()))
        if key not in self._metrics:
            self._metrics[key] = self._family.Metric(labels=labels)
            self._seen[key] = 0.0
        if not self._counter:
            self._metrics[key].set(value)
        elif value > self._seen[key]:
            self._metrics[key].increment(value - self._seen[key])
            self._seen[key] = value


class OrchestratorMetrics:
    """An orchestrator's counters."""

    def __init__(self, pipeline: str, orchestrator: Orchestrator) -> None:
        self._pipeline = pipeline
        self._source = orchestrator
        self._next_s = 0.0
        self._lock = threading.Lock()
        self._requests = _Family("omni_requests_total", "Requests by outcome", True)
        self._running = _Family("omni_requests_running", "Requests in work", False)
        self._waiting = _Family("omni_requests_waiting", "Requests waiting for admission", False)
        self._pieces = _Family("omni_output_pieces_total", "Responses with output, by output", True)
        self._usage = _Family("omni_usage_total", "Tokens, audio samples, images: by kind", True)
        self._opened = _Family("omni_stage_runs_opened_total", "Runs opened, by stage", True)
        self._lost = _Family("omni_stage_runs_lost_total", "Runs whose worker died, by stage", True)
        self._histograms = {
            name: _HistogramFamily(f"omni_{name}_seconds", text)
            for name, text in (
                ("queue", "Wait for admission"),
                ("first_output", "Arrival to first piece, by output"),
                ("request", "Arrival to end"),
            )
        }

    def publish(self) -> None:
        """Bring the page up to date: at most once a second, and always for the last request in work."""
        now = time.monotonic()
        working = [live for live in list(self._source.lives.values()) if live.machine.outcome is None]
        with self._lock:
            if now < self._next_s and working:
                return
            self._next_s = now + PUBLISH_S
            self._publish(sum(live.admitted_s is not None for live in working), len(working))

    def _publish(self, running: int, working: int) -> None:
        metrics, own = self._source.metrics, {"pipeline": self._pipeline}
        self._running.set(running, **own)
        self._waiting.set(working - running, **own)
        for family, label, values in (
            (self._requests, "outcome", metrics.requests),
            (self._pieces, "output", metrics.pieces),
            (self._usage, "kind", metrics.usage),
            (self._opened, "stage", metrics.opened),
            (self._lost, "stage", metrics.lost),
        ):
            for key, value in list(values.items()):
                family.set(value, **own, **{label: key})
        self._histograms["queue"].set(metrics.queue_s, **own)
        self._histograms["request"].set(metrics.total_s, **own)
        for output, histogram in list(metrics.first_output_s.items()):
            self._histograms["first_output"].set(histogram, **own, output=output)


class _HistogramFamily:
    """A Prometheus histogram out of three counter families: 24.10 has no custom histograms."""

    def __init__(self, name: str, description: str) -> None:
        self._bucket = _Family(f"{name}_bucket", description, True)
        self._count = _Family(f"{name}_count", description, True)
        self._sum = _Family(f"{name}_sum", description, True)

    def set(self, histogram: Histogram, **labels: str) -> None:
        for bound, count in zip(BUCKETS_S, histogram.counts, strict=True):
            self._bucket.set(count, **labels, le=f"{bound:g}")
        self._bucket.set(histogram.total, **labels, le="+Inf")
        self._count.set(histogram.total, **labels)
        self._sum.set(histogram.sum_s, **labels)


class StageMetrics:
    """A worker's numbers, as its latest Ping brought them. A restarted worker counts from zero; the page does not."""

    NAMES = {
        "runs": "Runs taken",
        "steps": "Engine steps",
        "step_s": "Seconds spent in engine steps",
        "chunks_out": "Chunks sent",
        "bytes_out": "Payload bytes sent",
        "finished": "Runs that came to their natural end",
        "failed": "Runs that failed",
        "stopped": "Runs stopped on request",
    }

    def __init__(self, pipeline: str, stage: str) -> None:
        self._labels = {"pipeline": pipeline, "stage": stage}
        self._families = {key: _Family(f"omni_stage_{key}_total", text, True) for key, text in self.NAMES.items()}
        self._live = _Family("omni_stage_runs_live", "Runs in the stage now", False)
        self._restarts = _Family("omni_stage_worker_restarts_total", "Worker restarts", True)
        self._base = dict.fromkeys(self.NAMES, 0.0)
        self._last = dict.fromkeys(self.NAMES, 0.0)
        self._now = (0, 0)
        self._next_s = 0.0
        self._lock = threading.Lock()

    def note(self, numbers: dict[str, float], live: int, restarts: int) -> None:
        """Keep what a Ping brought."""
        with self._lock:
            for key in self.NAMES:
                value = numbers.get(key, 0.0)
                if value < self._last[key]:
                    self._base[key] += self._last[key]
                self._last[key] = value
            self._now = (live, restarts)

    def publish(self) -> None:
        """Bring the page up to date: at most once a second, and always when no run is left."""
        now, (live, restarts) = time.monotonic(), self._now
        with self._lock:
            if now < self._next_s and live:
                return
            self._next_s = now + PUBLISH_S
            self._live.set(live, **self._labels)
            self._restarts.set(restarts, **self._labels)
            for key, family in self._families.items():
                family.set(self._base[key] + self._last[key], **self._labels)
