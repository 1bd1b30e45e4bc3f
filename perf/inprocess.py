# SPDX-License-Identifier: Apache-2.0
"""The baseline: a pipeline's engines in one process, taking turns, without server, links and workers.

    python -m perf.inprocess PIPELINE --loads '[[4, 8]]' --out requests.json
    python -m perf.inprocess PIPELINE --answers FD       one load per line of standard input, one line of FD each

`"whole"` as the third element of a load answers as transformers' own `generate` does: one request after another, and a
stage starts when the one before it is through. Same engines, options and chunks as the server's; what is missing is
transport, and that stages run at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from perf.harness import request_json
from perf.measures import Piece
from triton_omni.backends.config import paths
from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.engine import (
    Engine,
    EngineChunk,
    EngineEvent,
    EngineFailed,
    EngineFinished,
    EngineOutput,
    Run,
)
from triton_omni.backends.core.generate import GenerateRequest, decode_request
from triton_omni.backends.core.pipeline import EngineContext, Pipeline
from triton_omni.backends.deploy.load import load_deploy
from triton_omni.backends.pipelines import load
from triton_omni.backends.supervisor.home import REPO

WINDOW_CHUNKS = 8  # as many chunks wait on an edge here as a link lets wait (connectors.base)


@dataclass(eq=False)
class Job:
    """One request: a run per stage, what waits on each edge, and what its client got."""

    start_s: float
    runs: dict[str, Run]
    inbox: dict[str, deque[Chunk]]
    sent: Counter[str] = field(default_factory=Counter[str])
    over: set[str] = field(default_factory=set[str])
    pieces: list[Piece] = field(default_factory=list[Piece])
    failed: bool = False
    end_s: float = 0.0

    @property
    def done(self) -> bool:
        return len(self.over) == len(self.runs)


class Chain:
    """Engines by stage; each turn feeds and steps every one of them."""

    def __init__(self, pipeline: Pipeline, engines: Mapping[str, Engine]) -> None:
        self._pipeline = pipeline
        self._engines = engines
        self._jobs: dict[bytes, Job] = {}
        self._whole = False

    def drive(self, request: GenerateRequest, concurrency: int, count: int, how: str = "") -> list[Job]:
        """`count` requests, `concurrency` at a time; `how` "whole": all arrive at once and are answered in turn."""
        arrived_s, self._whole = time.monotonic(), how == "whole"
        if self._whole:
            jobs = [job for _ in range(count) for job in self._drive(request, 1, 1)]
            for job in jobs:
                job.start_s = arrived_s
                job.pieces = [replace(piece, at_s=job.end_s) for piece in job.pieces]
            return jobs
        return self._drive(request, concurrency, count)

    def _drive(self, request: GenerateRequest, concurrency: int, count: int) -> list[Job]:
        jobs: list[Job] = []
        while True:
            while len(self._jobs) < concurrency and len(jobs) < count:
                jobs.append(self._open(request))
            if not self._jobs:
                return jobs
            for stage in self._engines:
                self._turn(stage)

    def _open(self, request: GenerateRequest) -> Job:
        wanted, needed = self._pipeline.plan(request).wanted, self._pipeline.plan(request).needed
        run_id, runs = os.urandom(16), {}
        started_s = time.monotonic()
        for stage in self._pipeline.consumers_first(needed):
            runs[stage] = Run(
                run_id,
                run_id.hex(),
                request,
                upstream=self._pipeline.upstream(stage, needed),
                wanted=frozenset(o.name for o in self._pipeline.outputs if o.stage == stage and o.name in wanted),
                feeds=bool(self._pipeline.downstream(stage, needed)),
            )
            self._engines[stage].open(runs[stage])
        job = self._jobs[run_id] = Job(started_s, runs, {stage: deque() for stage in runs})
        return job

    def _turn(self, stage: str) -> None:
        engine = self._engines[stage]
        for job in self._jobs.values():
            if stage in job.runs:
                self._feed(job, stage, engine)
                targets = self._pipeline.downstream(stage, job.runs)
                full = any(len(job.inbox[target]) >= WINDOW_CHUNKS for target in targets)
                job.runs[stage].blocked = full and not self._whole
        if engine.has_work:
            for event in engine.step():
                self._route(self._jobs[event.run.id], stage, event)

    def _feed(self, job: Job, stage: str, engine: Engine) -> None:
        box = job.inbox[stage]
        if self._whole and not self._pipeline.upstream(stage, job.runs) <= job.over:
            return
        while box:
            chunk = box[0]
            adapter = next(e.adapter for e in self._pipeline.edges if (e.source, e.target) == (chunk.edge, stage))
            if not engine.feed(job.runs[stage], adapter(chunk), chunk.last):
                return
            box.popleft()

    def _route(self, job: Job, stage: str, event: EngineEvent) -> None:
        match event:
            case EngineOutput(run, piece):
                if piece.kind in run.wanted:
                    job.pieces.append(Piece(time.monotonic(), piece.kind, piece.playback_s))
            case EngineChunk(run, tensors, piece, last):
                self._pass_on(job, Chunk(run.id, stage, job.sent[stage], last, tensors, piece))
            case EngineFinished(run):
                self._pass_on(job, Chunk(run.id, stage, job.sent[stage], True))
                self._close(job, stage)
            case EngineFailed():
                job.failed = True
                for other in job.runs:
                    self._engines[other].stop(job.runs[other])
                    self._close(job, other)

    def _pass_on(self, job: Job, chunk: Chunk) -> None:
        job.sent[chunk.edge] += 1
        for target in self._pipeline.downstream(chunk.edge, job.runs):
            job.inbox[target].append(chunk)

    def _close(self, job: Job, stage: str) -> None:
        job.over.add(stage)
        if job.done:
            job.end_s = time.monotonic()
            self._jobs.pop(next(iter(job.runs.values())).id, None)


def contexts(pipeline: Pipeline) -> dict[str, EngineContext]:
    """What each stage's engine is made from, by the committed deploy file, on the CPU."""
    deploy = load_deploy(REPO / "backends" / "pipelines" / pipeline.name / "deploy.yaml", pipeline)
    return {
        name: EngineContext(pipeline.name, name, stage.engine, "cpu", str(paths.models_dir()))
        for name, stage in deploy.stages.items()
    }


def environment(pipeline: Pipeline) -> dict[str, str]:
    """The variables that the stages' workers get, for one process that holds them all."""
    variables = {"OMP_NUM_THREADS": "1"}
    for name, context in contexts(pipeline).items():
        variables |= dict(pipeline.stage(name).environment(context))
    return variables


def request_of(pipeline: str) -> GenerateRequest:
    return decode_request(request_json(pipeline).encode())


def trace_fields(job: Job) -> dict[str, Any]:
    """The fields of measures.RequestTrace."""
    pieces = [asdict(piece) for piece in job.pieces]
    return {"start_s": job.start_s, "end_s": job.end_s, "completed": not job.failed, "pieces": pieces}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline")
    parser.add_argument("--loads", help="JSON: [[concurrency, count], …]")
    parser.add_argument("--out", type=Path, help="JSON file of the requests of each load")
    parser.add_argument("--answers", type=int, help="file descriptor for the requests of each load of standard input")
    args = parser.parse_args()
    pipeline, request = load(args.pipeline), request_of(args.pipeline)
    needed = pipeline.plan(request).needed
    engines = {n: pipeline.stage(n).engine(c) for n, c in contexts(pipeline).items() if n in needed}
    chain = Chain(pipeline, engines)
    chain.drive(request, 1, 1)  # the first request ever also pays for lazy set-up
    if args.answers is not None:
        with open(args.answers, "w") as answers:
            print("ready", file=answers, flush=True)
            for line in sys.stdin:
                cpu_s = time.process_time()
                traces = [trace_fields(job) for job in chain.drive(request, *json.loads(line))]
                print(json.dumps([time.process_time() - cpu_s, traces]), file=answers, flush=True)
    else:
        loads = [[trace_fields(job) for job in chain.drive(request, *one)] for one in json.loads(args.loads)]
        args.out.write_text(json.dumps(loads))
    for engine in engines.values():
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
