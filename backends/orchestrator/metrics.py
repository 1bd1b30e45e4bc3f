# SPDX-License-Identifier: Apache-2.0
"""The numbers of one orchestrator, and how numbers are kept: `triton` publishes them, tests reconcile them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from triton_omni.backends.control.messages import RunStats, Transfer
from triton_omni.backends.core.pipeline import Pipeline

CLIENT = "client"
"""The target of the edges on which outputs leave the pipeline."""
RUN_OUTCOMES = ("finished", "failed", "stopped", "lost", "refused")

# Bounds of the histograms' buckets. Each bound above a value is one more call to Triton before the FINAL of a lone
# request (decision 0004), so there are no more than somebody reads.
_WAIT_S = (0.01, 0.1, 1.0, 10.0)
_FIRST_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_GAP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_REQUEST_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_RTF = (0.1, 0.25, 0.5, 0.75, 1.0, 2.0)
_PAUSE_S = (0.1, 0.5, 2.0)
_RUN_S = (0.1, 1.0, 10.0, 60.0)
_RUN_FIRST_S = (0.01, 0.1, 1.0, 10.0)


@dataclass(slots=True)
class Histogram:
    """Values in buckets; the last holds those above every bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> list[int]:
        """Values up to each bound and in all, as Prometheus counts them."""
        return list(accumulate(self.counts))

    @property
    def total(self) -> int:
        return sum(self.counts)


@dataclass
class Family:
    """One number per set of label values; `labels` come after the pipeline's own."""

    name: str
    kind: Literal["counter", "gauge"]
    about: str
    labels: tuple[str, ...] = ()
    values: dict[tuple[str, ...], float] = field(default_factory=dict[tuple[str, ...], float])

    def add(self, amount: float, *labels: str) -> None:
        """Count `amount` more; 0 makes the number exist."""
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def set(self, value: float, *labels: str) -> None:
        """Replace a gauge's value."""
        self.values[labels] = value


@dataclass
class HistogramFamily:
    """One histogram per set of label values."""

    name: str
    about: str
    bounds: tuple[float, ...]
    labels: tuple[str, ...] = ()
    values: dict[tuple[str, ...], Histogram] = field(default_factory=dict[tuple[str, ...], Histogram])

    def at(self, *labels: str) -> Histogram:
        """The histogram of these labels, made on first use."""
        found = self.values.get(labels)
        if found is None:
            found = self.values[labels] = Histogram(self.bounds)
        return found


@dataclass(slots=True)
class Player:
    """A listener who starts at the first audio and plays each piece as soon as possible."""

    audio_s: float = 0.0
    last_s: float = 0.0
    ready_s: float | None = None
    longest_pause_s: float = 0.0

    def receive(self, at_s: float, piece_s: float) -> None:
        """A piece of audio arrived."""
        ready_s = at_s if self.ready_s is None else self.ready_s
        self.longest_pause_s = max(self.longest_pause_s, at_s - ready_s)
        self.ready_s = max(ready_s, at_s) + piece_s
        self.audio_s += piece_s
        self.last_s = at_s


class PipelineMetrics:
    """What happened to the requests of one pipeline. docs/metrics-and-traces.md defines each number."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.requests = Family("omni_requests_total", "counter", "Requests that have ended", ("outcome",))
        self.cancelled = Family("omni_requests_cancelled_total", "counter", "Cancelled requests", ("reason",))
        self.running = Family("omni_requests_running", "gauge", "Requests running")
        self.waiting = Family("omni_requests_waiting", "gauge", "Requests waiting for admission")
        self.queue_s = HistogramFamily("omni_queue_seconds", "Arrival to admission", _WAIT_S)
        self.request_s = HistogramFamily("omni_request_seconds", "Arrival to end", _REQUEST_S, ("outcome",))
        self.first_output_s = HistogramFamily(
            "omni_first_output_seconds", "Arrival to first piece", _FIRST_S, ("output",)
        )
        self.gap_s = HistogramFamily("omni_output_gap_seconds", "Between two pieces of an output", _GAP_S, ("output",))
        self.pieces = Family("omni_output_pieces_total", "counter", "Responses with output", ("output",))
        self.usage = Family("omni_usage_total", "counter", "Tokens, samples, images", ("kind",))
        self.audio_s = Family("omni_audio_seconds_total", "counter", "Seconds of audio sent")
        self.audio_rtf = HistogramFamily("omni_audio_rtf", "Arrival to last audio, over its length", _RTF)
        self.underrun_s = HistogramFamily("omni_audio_underrun_seconds", "Longest pause a listener hears", _PAUSE_S)
        self.opened = Family("omni_stage_runs_opened_total", "counter", "Runs opened", ("stage",))
        self.retries = Family(
            "omni_request_retries_total", "counter", "Requests that began again after a worker died", ("stage",)
        )
        self.runs = Family("omni_stage_runs_total", "counter", "Runs that have ended", ("stage", "outcome"))
        self.run_s = HistogramFamily("omni_stage_run_seconds", "Open to end", _RUN_S, ("stage",))
        self.run_first_s = HistogramFamily(
            "omni_stage_first_output_seconds", "Open to first chunk", _RUN_FIRST_S, ("stage",)
        )
        edge = ("source", "target")
        self.edge_chunks = Family("omni_edge_chunks_total", "counter", "Chunks received", edge)
        self.edge_bytes = Family("omni_edge_bytes_total", "counter", "Payload bytes received", edge)
        self.edge_transfer_s = Family("omni_edge_transfer_seconds_total", "counter", "Put to receipt", edge)
        self.edge_wait_s = Family("omni_edge_wait_seconds_total", "counter", "Receipt to the engine", edge)
        self._show_zeros(pipeline)

    @property
    def families(self) -> list[Family | HistogramFamily]:
        """Everything there is to publish."""
        return list(vars(self).values())

    def _show_zeros(self, pipeline: Pipeline) -> None:
        """Counters whose labels are known from the start: a rate needs to see them start."""
        for outcome in ("completed", "cancelled"):
            self.requests.add(0, outcome)
        for reason in ("abort", "client_gone"):
            self.cancelled.add(0, reason)
        self.audio_s.add(0)
        for output in pipeline.outputs:
            self.pieces.add(0, output.name)
        for stage in pipeline.stages:
            self.opened.add(0, stage.name)
            self.retries.add(0, stage.name)
            for outcome in RUN_OUTCOMES:
                self.runs.add(0, stage.name, outcome)
        edges = [(e.source, e.target) for e in pipeline.edges]
        for ends in edges + [(o.stage, CLIENT) for o in pipeline.outputs]:
            self.edge_ended(*ends, Transfer())

    def ended(self, outcome: str, total_s: float, usage: dict[str, float]) -> None:
        """Count one end."""
        self.requests.add(1, outcome)
        self.request_s.at(outcome).observe(total_s)
        for name, count in usage.items():
            self.usage.add(count, name)

    def played(self, player: Player, arrived_s: float) -> None:
        """Count what a listener got of a request that completed with audio."""
        self.audio_rtf.at().observe((player.last_s - arrived_s) / player.audio_s)
        self.underrun_s.at().observe(player.longest_pause_s)

    def run_ended(self, stage: str, lost: bool, stats: RunStats | None) -> None:
        """Count the end of one run; `stats` is None where no worker measured it."""
        if stats is None or lost:
            self.runs.add(1, stage, "lost" if lost else "refused")
            return
        self.runs.add(1, stage, stats.outcome)
        self.run_s.at(stage).observe(stats.total_s)
        if stats.first_s is not None:
            self.run_first_s.at(stage).observe(stats.first_s)
        for source, transfer in stats.edges.items():
            self.edge_ended(source, stage, transfer)

    def edge_ended(self, source: str, target: str, transfer: Transfer) -> None:
        """Count what one edge delivered to a run, or to the client, whose waiting time is not known."""
        self.edge_chunks.add(transfer.chunks, source, target)
        self.edge_bytes.add(transfer.nbytes, source, target)
        self.edge_transfer_s.add(transfer.transfer_s, source, target)
        if target != CLIENT:
            self.edge_wait_s.add(transfer.wait_s, source, target)
