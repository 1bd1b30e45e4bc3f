# SPDX-License-Identifier: Apache-2.0
"""A pipeline's engines driven in this process as workers would drive them, without links between them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import (
    Engine,
    EngineChunk,
    EngineEvent,
    EngineFailed,
    EngineFinished,
    EngineOutput,
    Run,
)
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.outputs import TextPiece
from triton_omni.backends.core.pipeline import Pipeline

TURN_LIMIT = 20_000


@dataclass(eq=False)
class Job:
    """One request: a run per stage, what came of each, and what waits on each edge."""

    runs: dict[str, Run]
    events: dict[str, list[EngineEvent]] = field(default_factory=dict)
    inbox: dict[str, deque[tuple[str, Chunk]]] = field(default_factory=dict)
    order: list[tuple[str, str]] = field(default_factory=list)
    """(stage, kind of event), as they came."""

    def sent(self, stage: str, name: str) -> np.ndarray:
        """Everything a stage sent of one tensor, joined."""
        sends = [e for e in self.events[stage] if isinstance(e, EngineChunk)]
        parts = [t.torch().cpu().numpy() for e in sends for t in e.tensors if t.name == name]
        return np.concatenate(parts) if parts else np.zeros(0)

    def tokens(self, stage: str = "thinker") -> list[int]:
        return [token for piece in self._texts(stage) for token in piece.token_ids]

    def text(self, stage: str = "thinker") -> str:
        return "".join(piece.text for piece in self._texts(stage))

    def _texts(self, stage: str) -> list[TextPiece]:
        pieces = [e.piece for e in self.events[stage] if isinstance(e, EngineOutput)]
        return [piece for piece in pieces if isinstance(piece, TextPiece)]

    def audio(self, stage: str = "code2wav") -> np.ndarray:
        parts = [e.tensors[0].data for e in self.events[stage] if isinstance(e, EngineOutput)]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def end(self, stage: str) -> EngineFinished | EngineFailed:
        last = self.events[stage][-1]
        assert isinstance(last, EngineFinished | EngineFailed)
        return last

    def over(self, stage: str) -> bool:
        return bool(self.events[stage]) and isinstance(self.events[stage][-1], EngineFinished | EngineFailed)


class Chain:
    """Engines by stage, stepped in turn. Chunks cross an edge through the pipeline's adapter."""

    def __init__(self, pipeline: Pipeline, engines: Mapping[str, Engine]) -> None:
        self.pipeline = pipeline
        self.engines = engines
        self.jobs: list[Job] = []

    def open(self, request: GenerateRequest, inputs: Mapping[str, Tensor] | None = None) -> Job:
        run_id = os.urandom(16)
        stages = set(self.engines)
        runs = {
            name: Run(
                run_id,
                "r",
                request,
                dict(inputs or {}),
                self.pipeline.upstream(name, stages),
                frozenset(o.name for o in self.pipeline.outputs if o.stage == name),
                bool(self.pipeline.downstream(name, stages)),
            )
            for name in self.engines
        }
        job = Job(runs, {name: [] for name in runs}, {name: deque() for name in runs})
        for name in self.pipeline.consumers_first(frozenset(runs)):
            self.engines[name].open(runs[name])
        self.jobs.append(job)
        return job

    def stop(self, job: Job) -> None:
        for name, run in job.runs.items():
            self.engines[name].stop(run)
        self.jobs.remove(job)

    def turn(self, *stages: str) -> None:
        """Feed and step every engine once, or only those named."""
        for name in stages or self.engines:
            for job in self.jobs:
                self._feed(name, job)
            if self.engines[name].has_work:
                for event in self.engines[name].step():
                    self._route(name, event)

    def run(self) -> None:
        """Until every job is over."""
        for _ in range(TURN_LIMIT):
            if all(job.over(name) for job in self.jobs for name in self.engines):
                self.jobs.clear()
                return
            self.turn()
        raise AssertionError("the chain never came to its end")

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def _feed(self, name: str, job: Job) -> None:
        box = job.inbox[name]
        while box:
            source, chunk = box[0]
            adapter = next(e.adapter for e in self.pipeline.edges if (e.source, e.target) == (source, name))
            if not self.engines[name].feed(job.runs[name], adapter(chunk), chunk.last):
                return
            box.popleft()

    def _route(self, name: str, event: EngineEvent) -> None:
        job = next((j for j in self.jobs if j.runs[name] is event.run), None)
        assert job is not None, f"{name} spoke of a run that was stopped"
        assert not job.over(name), f"{name} spoke after its end"
        job.events[name].append(event)
        job.order.append((name, type(event).__name__))
        targets = self.pipeline.downstream(name, set(self.engines))
        for target in targets:
            if isinstance(event, EngineChunk):
                job.inbox[target].append((name, Chunk(event.run.id, name, 0, False, event.tensors, event.piece)))
            elif isinstance(event, EngineFinished):
                job.inbox[target].append((name, Chunk(event.run.id, name, 0, True)))
