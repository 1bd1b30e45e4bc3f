# SPDX-License-Identifier: Apache-2.0
"""What a server is doing, from Triton's metrics and the health of its pipelines: for `top` and /v1/events. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW_S = 60.0
"""Latencies are those of the requests that ended within it."""
RATE_S = 6.0
"""Rates are means over it: while requests run, a server updates its metrics every 5 s."""
QUANTILES = {"p50": 0.5, "p95": 0.95}
TOKENS = "completion_tokens"
_SAMPLE = re.compile(r"^((?:omni|nv)_\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class MetricsPage:
    """The samples of one reading of Triton's metrics, by name."""

    def __init__(self, text: str = "") -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for match in _SAMPLE.finditer(text):
            labels = dict(_LABEL.findall(match[2] or ""))
            self._samples.setdefault(match[1], []).append((labels, float(match[3])))

    def __bool__(self) -> bool:
        return bool(self._samples)

    def by(self, name: str, label: str, **having: str) -> dict[str, float]:
        """Value of `label` → sum of the samples that have these labels."""
        found: dict[str, float] = {}
        for labels, value in self._samples.get(name, ()):
            if label in labels and having.items() <= labels.items():
                found[labels[label]] = found.get(labels[label], 0.0) + value
        return found

    def total(self, name: str, **having: str) -> float:
        """Sum of the samples that have these labels; 0 if there are none."""
        return sum(value for labels, value in self._samples.get(name, ()) if having.items() <= labels.items())

    @property
    def models(self) -> list[str]:
        """Names of Triton's models."""
        return list(self.by("nv_inference_request_success", "model"))


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """A quantile of values counted in cumulative buckets (upper bound → count), linear within a bucket.

    None without values; the last finite bound for what lies above all.
    """
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound in sorted(buckets):
        count = buckets[bound]
        if count >= q * total:
            is_inside = bound != float("inf") and count > below
            return lower + (bound - lower) * (q * total - below) / (count - below) if is_inside else lower
        lower, below = bound, count
    return lower


class LiveView:
    """Readings of the last WINDOW_S, and what has changed between them."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, MetricsPage]] = deque()

    def add(self, at_s: float, page: MetricsPage) -> None:
        """Take a reading; an empty one says nothing."""
        if page:
            self._readings.append((at_s, page))
        while self._readings and self._readings[0][0] < at_s - WINDOW_S:
            self._readings.popleft()

    def pipeline(self, name: str) -> dict[str, Any]:
        """Rates and latencies of a pipeline; None for those that are not known."""
        return {
            "tokens_per_s": self._rate("omni_usage_total", pipeline=name, kind=TOKENS),
            "audio_s_per_s": self._rate("omni_audio_seconds_total", pipeline=name),
            "requests_per_s": self._rate("omni_requests_total", pipeline=name),
            "first_output_s": self._latencies("omni_first_output_seconds_bucket", name),
        }

    def stage(self, pipeline: str, stage: str) -> dict[str, Any]:
        """Steps of a stage, and how many runs shared one; runs by worker."""
        own = {"pipeline": pipeline, "stage": stage}
        steps, runs = (self._rate(f"omni_stage_{name}_total", **own) for name in ("steps", "step_runs"))
        page = self._readings[-1][1] if self._readings else MetricsPage()
        return {
            "steps": page.total("omni_stage_steps_total", **own) if page else None,
            "steps_per_s": steps,
            "runs_per_step": runs / steps if steps and runs is not None else None,
            "workers": {name: int(live) for name, live in page.by("omni_stage_runs_live", "worker", **own).items()},
        }

    def gpus(self) -> list[dict[str, Any]]:
        """Memory of the GPUs that Triton reports."""
        page = self._readings[-1][1] if self._readings else MetricsPage()
        used = page.by("nv_gpu_memory_used_bytes", "gpu_uuid")
        total = page.by("nv_gpu_memory_total_bytes", "gpu_uuid")
        return [{"gpu": gpu, "used_bytes": used[gpu], "total_bytes": total.get(gpu)} for gpu in sorted(used)]

    # ---
    def _since(self, seconds: float) -> tuple[float, MetricsPage, MetricsPage] | None:
        """(seconds between, earlier reading, latest reading)"""
        if len(self._readings) < 2:
            return None
        last_s, last = self._readings[-1]
        first_s, first = next(reading for reading in self._readings if reading[0] >= last_s - seconds)
        if first is last:
            first_s, first = self._readings[-2]
        return last_s - first_s, first, last

    def _rate(self, name: str, **labels: str) -> float | None:
        between = self._since(RATE_S)
        if between is None or between[0] <= 0:
            return None
        seconds, first, last = between
        return max(0.0, last.total(name, **labels) - first.total(name, **labels)) / seconds

    def _latencies(self, name: str, pipeline: str) -> dict[str, dict[str, float | None]]:
        """Output → quantiles of the requests that ended within the window; of all that ended before, if none did."""
        between = self._since(WINDOW_S)
        if between is None and not self._readings:
            return {}
        last = self._readings[-1][1]
        first = between[1] if between is not None else MetricsPage()
        found: dict[str, dict[str, float | None]] = {}
        for output in last.by(name, "output", pipeline=pipeline):
            now, then = (page.by(name, "le", pipeline=pipeline, output=output) for page in (last, first))
            counts = {float(bound): count - then.get(bound, 0.0) for bound, count in now.items()}
            if not any(counts.values()):
                counts = {float(bound): count for bound, count in now.items()}
            found[output] = {label: quantile(counts, q) for label, q in QUANTILES.items()}
        return found
