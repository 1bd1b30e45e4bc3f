# SPDX-License-Identifier: Apache-2.0
"""The graph of one model family, as data: stages, edges, outputs, operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from triton_omni.backends.core.chunk import Chunk, TensorSpec
from triton_omni.backends.core.engine import Engine
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest

Adapter = Callable[[Chunk], Any]
MEDIA = ("audio", "image", "video")
"""Kinds of content that cross as tensors of the same name."""
CLIENT_EDGE = "client"
"""Source of the edge that brings an entry stage what its client streams."""


def no_environment(context: EngineContext) -> Mapping[str, str]:
    """The environment hook of an engine that needs no variables of its own."""
    return {}


def accept_all(request: GenerateRequest, engine: Mapping[str, object]) -> None:
    """The check of a stage that refuses nothing before it runs."""


def whole_chunk(chunk: Chunk) -> Chunk:
    """The adapter of an edge whose consumer reads chunks as they are."""
    return chunk


@dataclass(frozen=True)
class EngineContext:
    """What a stage's engine is built from, in its worker. `device` is "cpu" or "cuda"."""

    pipeline: str
    stage: str
    options: Mapping[str, object]
    """The stage's `engine:` section of deploy.yaml."""
    device: str = "cpu"
    models_dir: str = ""
    """Folder that relative model names are resolved in."""
    wake: Callable[[], None] = lambda: None
    """Makes a sleeping loop ask the engine again for work; from any thread."""


@dataclass(frozen=True)
class Stage:
    """One step of a pipeline: one Triton model, one engine.

    engine   makes the engine in the worker process; heavy imports belong inside the function
    environment  variables its worker process starts with (thread counts, preloads); runs in the thin stub
    inputs   tensors a direct call may bring as one last chunk (name, dtype, shape with -1)
    outputs  tensors its chunks and outputs carry
    media    kind of media this entry stage consumes; it is opened only for requests that bring some
    params   typed parameters of a request that this stage takes: "image" is all of them, "speech.voice" is one
    check    raises BadRequest, naming the field, for requests that an engine with these options of deploy.yaml would
             refuse; the orchestrator calls it before admission
    """

    name: str
    engine: Callable[[EngineContext], Engine]
    environment: Callable[[EngineContext], Mapping[str, str]] = no_environment
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    media: str = ""
    params: tuple[str, ...] = ()
    check: Callable[[GenerateRequest, Mapping[str, object]], None] = accept_all


@dataclass(frozen=True)
class Edge:
    """A directed link from `source` to `target`; `adapter` turns a chunk into the target engine's inputs."""

    source: str
    target: str
    adapter: Adapter = whole_chunk


@dataclass(frozen=True)
class Output:
    """Something clients can ask for, and the stage it comes from.

    optional  a stage that leads to nothing but optional outputs may fail or be late: these outputs end with a reason
              in the request's end, and the request goes on
    """

    name: str
    stage: str
    optional: bool = False


@dataclass(frozen=True)
class Operation:
    """A way into the pipeline: the stage where the request enters and what comes out by default.

    feed  turns a chunk of text that the client streams (`open_input`) into the entry engine's inputs, as the
          adapter of an edge; None: the input comes whole
    """

    name: str
    entry: str
    outputs: tuple[str, ...]
    feed: Adapter | None = None


@dataclass(frozen=True)
class RequestPlan:
    """What a request takes of its pipeline.

    wanted  outputs that the client asked for
    needed  stages to open: on the way from the entry to a wanted output, and media stages that the request needs
    """

    wanted: frozenset[str]
    needed: frozenset[str]


def _no_check(request: GenerateRequest) -> None:
    """Accept every request."""


@dataclass(frozen=True)
class Pipeline:
    """Stages, edges and outputs of one model family.

    check  raises BadRequest naming the field if the request cannot be served; runs before any stage is opened
    about  facts shown by /v1/models and the health request (voices, sample rate, …)
    """

    name: str
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    outputs: tuple[Output, ...]
    operations: tuple[Operation, ...]
    check: Callable[[GenerateRequest], None] = _no_check
    about: Mapping[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        names = [s.name for s in self.stages]
        assert len(set(names)) == len(names), f"{self.name}: a stage name is used twice"
        assert CLIENT_EDGE not in names, f"{self.name}: no stage may be called '{CLIENT_EDGE}'"
        for edge in self.edges:
            assert edge.source in names and edge.target in names, f"{self.name}: edge {edge} names an unknown stage"
        for output in self.outputs:
            assert output.stage in names, f"{self.name}: output {output} names an unknown stage"
        for operation in self.operations:
            assert operation.entry in names, f"{self.name}: operation {operation} enters an unknown stage"
            assert set(operation.outputs) <= {o.name for o in self.outputs}, f"{self.name}: {operation}"
        self.consumers_first(frozenset(names))

    def stage(self, name: str) -> Stage:
        return next(s for s in self.stages if s.name == name)

    def output(self, name: str) -> Output:
        return next(o for o in self.outputs if o.name == name)

    @property
    def media(self) -> tuple[str, ...]:
        """Kinds of content that messages may have: "text" and those that a stage has an input tensor for."""
        inputs = {spec.name for stage in self.stages for spec in stage.inputs}
        return ("text", *(kind for kind in MEDIA if kind in inputs))

    def model(self, stage: str) -> str:
        """The Triton model name of a stage."""
        return f"{self.name}_{stage}"

    def feeds_of(self, stage: str) -> dict[str, Adapter]:
        """Source → adapter of all that may feed a stage."""
        client = [operation.feed for operation in self.operations if operation.entry == stage and operation.feed]
        feeds = {edge.source: edge.adapter for edge in self.edges if edge.target == stage}
        return feeds | ({CLIENT_EDGE: client[0]} if client else {})

    def upstream(self, stage: str, within: Iterable[str]) -> frozenset[str]:
        """Stages among `within` that feed `stage`."""
        within = frozenset(within)
        return frozenset(e.source for e in self.edges if e.target == stage and e.source in within)

    def downstream(self, stage: str, within: Iterable[str]) -> frozenset[str]:
        """Stages among `within` that `stage` feeds."""
        within = frozenset(within)
        return frozenset(e.target for e in self.edges if e.source == stage and e.target in within)

    def consumers_first(self, stages: frozenset[str]) -> tuple[str, ...]:
        """`stages` in an order in which every consumer comes before its producers."""
        order: list[str] = []
        left = [s.name for s in self.stages if s.name in stages]
        while left:
            free = [s for s in left if not self.downstream(s, left)]
            assert free, f"{self.name}: the edges form a cycle"
            order += free
            left = [s for s in left if s not in free]
        return tuple(order)

    def operation(self, request: GenerateRequest) -> Operation:
        """The operation a request asks for."""
        for operation in self.operations:
            if operation.name == request.operation:
                return operation
        known = ", ".join(o.name for o in self.operations)
        raise BadRequest(f"unknown operation '{request.operation}'; this pipeline has: {known}", "operation")

    def check_params(self, request: GenerateRequest) -> None:
        """Refuse typed parameters that no stage takes, naming the field."""
        taken = {param for stage in self.stages for param in stage.params}
        for param in request.params():
            if taken.isdisjoint((param, param.partition(".")[0])):
                raise BadRequest(f"pipeline '{self.name}' does not take '{param}'", param)

    def may_refuse(self, stage: str, request: GenerateRequest) -> bool:
        """True if a stage may refuse a request that was checked when it opens: the request has options for it, or typed
        parameters that the stage takes and has no check for."""
        own = self.stage(stage)
        taken = any(not {param, param.partition(".")[0]}.isdisjoint(own.params) for param in request.params())
        return stage in request.stages or (taken and own.check is accept_all)

    def plan(self, request: GenerateRequest) -> RequestPlan:
        """What a request takes; raises BadRequest for an output that its operation cannot make."""
        operation = self.operation(request)
        names = request.modalities or operation.outputs
        reachable = {o.name for o in self.outputs if operation.entry in self.leading_to(o.stage)}
        for name in names:
            if name not in reachable:
                raise BadRequest(
                    f"unknown modality '{name}'; operation '{operation.name}' makes: {', '.join(sorted(reachable))}",
                    "modalities",
                )
        leading = frozenset[str]().union(*(self.leading_to(self.output(name).stage) for name in names))
        media = request.media()
        media_stages = {s.name for s in self.stages if s.media and s.media in media and s.name in leading}
        return RequestPlan(frozenset(names), (leading & self._following(operation.entry)) | media_stages)

    def served(self, ready: Iterable[str]) -> tuple[str, ...]:
        """Outputs that at least one operation can make with the stages `ready` alone."""
        paths = [
            (output.name, self.leading_to(output.stage) & self._following(operation.entry))
            for output in self.outputs
            for operation in self.operations
        ]
        return tuple(dict.fromkeys(name for name, path in paths if path and path <= frozenset(ready)))

    def leading_to(self, stage: str) -> frozenset[str]:
        """A stage, and all that feed it directly or through others."""
        return self._closure(stage, {(e.target, e.source) for e in self.edges})

    def _following(self, stage: str) -> frozenset[str]:
        return self._closure(stage, {(e.source, e.target) for e in self.edges})

    @staticmethod
    def _closure(start: str, steps: set[tuple[str, str]]) -> frozenset[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            stage = todo.pop()
            if stage not in seen:
                seen.add(stage)
                todo += [b for a, b in steps if a == stage]
        return frozenset(seen)
