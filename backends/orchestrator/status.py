# SPDX-License-Identifier: Apache-2.0
"""The state of a pipeline for clients: which stages are ready, how many requests there are. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from triton_omni.backends.control.records import InstanceRecord
from triton_omni.backends.core.generate import WIRE_VERSION
from triton_omni.backends.core.pipeline import Pipeline
from triton_omni.backends.core.responses import PipelineStatus, StageStatus
from triton_omni.backends.orchestrator.request_state import RequestState

MAX_LISTED_REQUESTS = 100


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
