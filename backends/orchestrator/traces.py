# SPDX-License-Identifier: Apache-2.0
"""One request as spans, written at once when it is over: queue, and each stage from accept to end.

Everything comes from times that are kept anyway, so a request costs nothing more while it lives. A stage's span starts
when the orchestrator was notified of its run and lasts as long as its worker says: no clock of another host is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_omni.backends.control.messages import RunStats
from triton_omni.backends.core.request import Outcome
from triton_omni.backends.orchestrator.request_state import RequestState
from triton_omni.backends.telemetry.traces import Traces, wall_ns

if TYPE_CHECKING:
    from opentelemetry.trace import Span


def write(traces: Traces, live: RequestState) -> None:
    """Write the spans of a request that is over."""
    end, ended_s = live.end, live.ended_s
    assert end is not None and ended_s is not None, "only a request that is over is written"
    pipeline = live.machine.pipeline.name
    root = traces.begin(pipeline, live.arrival.traceparent, live.arrived_s)
    for output, sent in live.sent.items():
        root.add_event(f"first {output}", timestamp=wall_ns(sent.first_s))
    queue = traces.begin("queue", root, live.arrived_s)
    traces.end(queue, {}, at_s=ended_s if live.admitted_s is None else live.admitted_s)
    error = end.error.line() if end.error is not None and end.outcome is Outcome.FAILED else ""
    for stage, run in live.runs.items():
        if run.accepted_s is not None:
            _write_stage(traces, live, root, stage, run.accepted_s, error)
    code = end.error.code if end.error is not None else end.outcome.value
    facts = {"omni.request_id": live.arrival.request_id, "omni.pipeline": pipeline, "omni.outcome": code}
    traces.end(root, facts | {f"omni.usage.{k}": v for k, v in live.usage(end).items()}, error, ended_s)


def _write_stage(traces: Traces, live: RequestState, root: Span, stage: str, accepted_s: float, error: str) -> None:
    span = traces.begin(f"{live.machine.pipeline.name}/{stage}", root, accepted_s)
    stats = live.runs[stage].stats
    outcome = "lost" if stats is None else stats.outcome
    if stats is not None and stats.first_s is not None:
        span.add_event("first output", timestamp=wall_ns(accepted_s + stats.first_s))
    facts: dict[str, str | float] = {"omni.stage": stage, "omni.outcome": outcome} | _edges(stats)
    failed = (error or outcome) if outcome in ("failed", "lost") else ""
    traces.end(span, facts, failed, live.ended_s if stats is None else accepted_s + stats.total_s)


def _edges(stats: RunStats | None) -> dict[str, str | float]:
    """What each edge delivered, in all."""
    return {
        f"omni.edge.{source}.{name}": value
        for source, transfer in (stats.edges if stats is not None else {}).items()
        for name, value in (
            ("chunks", transfer.chunks),
            ("bytes", transfer.nbytes),
            ("transfer_s", transfer.transfer_s),
            ("wait_s", transfer.wait_s),
        )
    }
