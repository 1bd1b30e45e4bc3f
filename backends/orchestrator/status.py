# SPDX-License-Identifier: Apache-2.0
"""The state of a pipeline for clients: which stages are ready, how many requests there are. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import msgspec

from triton_omni.backends.control.records import InstanceRecord
from triton_omni.backends.core.generate import WIRE_VERSION
from triton_omni.backends.core.pipeline import Pipeline
from triton_omni.backends.core.responses import PipelineStatus, RequestTrace, StageStatus, WaterfallSpan
from triton_omni.backends.orchestrator.request_state import RequestState

MAX_LISTED_REQUESTS = 100
KEPT_TRACES = 256


def pipeline_status(
    pipeline: Pipeline, stages: Mapping[str, StageStatus], requests: Collection[RequestState], *, can_open: bool
) -> PipelineStatus:
    """`stages`: of those that have an instance; `can_open`: Triton accepts new runs."""
    counted = {
        stage.name: msgspec.structs.replace(
            stages.get(stage.name, StageStatus()),
            live=sum(stage.name in request.machine.open_runs for request in requests),
        )
        for stage in pipeline.stages
    }
    ready = [name for name, stage in counted.items() if stage.state == "ready"]
    outputs = pipeline.served(ready) if can_open else ()
    whole = len(ready) == len(counted) and all(stage.ready == stage.instances for stage in counted.values())
    admitted = sum(request.admitted_s is not None for request in requests)
    return PipelineStatus(
        pipeline=pipeline.name,
        version=WIRE_VERSION,
        ready=can_open and len(ready) == len(counted),
        state="unavailable" if not outputs else "ready" if whole else "degraded",
        outputs=outputs,
        stages=counted,
        live=admitted,
        queued=len(requests) - admitted,
        operations=tuple(operation.name for operation in pipeline.operations),
        params=tuple(param for stage in pipeline.stages for param in stage.params),
        about={"media": list(pipeline.media), **pipeline.about},
    )


def with_requests(status: PipelineStatus, requests: Collection[RequestState], now_s: float) -> PipelineStatus:
    """The status with its oldest requests."""
    oldest = sorted(requests, key=lambda request: request.arrived_s)[:MAX_LISTED_REQUESTS]
    return msgspec.structs.replace(status, requests=tuple(request.status(now_s) for request in oldest))


class EndedRequests:
    """Traces of the latest requests that are over."""

    def __init__(self) -> None:
        self._traces: deque[tuple[float, RequestTrace]] = deque(maxlen=KEPT_TRACES)

    def add(self, state: RequestState) -> None:
        """Keep what is known of a request that is over; the state itself is not kept."""
        assert state.ended_s is not None, "only a request that is over is traced"
        self._traces.append((state.ended_s, trace_of(state)))

    def find(self, request_id: str, now_s: float) -> tuple[RequestTrace, ...]:
        """Traces of the requests that had this id, the latest last."""
        found = [(ended_s, trace) for ended_s, trace in self._traces if trace.id == request_id]
        return tuple(msgspec.structs.replace(trace, ended_s=now_s - ended_s) for ended_s, trace in found)


def trace_of(state: RequestState) -> RequestTrace:
    """A request that is over, as spans."""
    end, ended_s, arrived_s = state.end, state.ended_s, state.arrived_s
    assert end is not None and ended_s is not None, "only a request that is over is traced"
    admitted_s = ended_s if state.admitted_s is None else state.admitted_s
    spans = [WaterfallSpan(name="queue", start_s=0.0, end_s=admitted_s - arrived_s)]
    for stage, run in state.runs.items():
        if run.accepted_s is None:
            continue
        start_s, stats = run.accepted_s - arrived_s, run.stats
        first_s = None if stats is None or stats.first_s is None else start_s + stats.first_s
        end_s = ended_s - arrived_s if stats is None else start_s + stats.total_s
        outcome = "lost" if stats is None else stats.outcome
        spans.append(WaterfallSpan(name=stage, start_s=start_s, first_s=first_s, end_s=end_s, outcome=outcome))
    for output, sent in state.sent.items():
        start_s, end_s = sent.first_s - arrived_s, sent.last_s - arrived_s
        spans.append(WaterfallSpan(name=f"client {output}", start_s=start_s, end_s=end_s))
    return RequestTrace(
        id=state.arrival.request_id,
        operation=state.arrival.request.operation,
        outcome=end.outcome.value if end.error is None else end.error.code,
        total_s=ended_s - arrived_s,
        spans=tuple(sorted(spans, key=lambda span: span.start_s)),
    )


def stage_statuses(pipeline: Pipeline, records: Sequence[InstanceRecord]) -> dict[str, StageStatus]:
    """Stage → state of its instances, by the records of living processes."""
    statuses: dict[str, StageStatus] = {}
    for stage in pipeline.stages:
        own = [record for record in records if record.model == pipeline.model(stage.name)]
        if own:
            best = next((record for record in own if record.state == "ready"), own[0])
            statuses[stage.name] = StageStatus(
                state=best.state,
                instances=len(own),
                ready=sum(record.state == "ready" for record in own),
                restarts=sum(record.restarts for record in own),
                worker_pids=tuple(record.worker_pid for record in own),
                stub_pids=tuple(record.pid for record in own),
                ready_s=best.ready_s,
            )
    return statuses
