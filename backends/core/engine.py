# SPDX-License-Identifier: Apache-2.0
"""What computes inside a stage, as the worker's loop sees it.

The loop is single-threaded and drives an engine as follows until shutdown:

    open(run) … feed(run, inputs, last) … step() → events … stop(run)

An engine never blocks longer than one step, never starts a run by itself and never touches a socket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.errors import OmniError
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.hints import field_names, nearest_key
from triton_omni.backends.core.outputs import OutputPiece

AnyOptions = TypeVar("AnyOptions", bound=msgspec.Struct)


class OptionsError(ValueError):
    """Engine options or the model they name cannot be used; the text names the stage, the key or the file."""


def read_engine_options(options: Mapping[str, object], kind: type[AnyOptions], stage: str) -> AnyOptions:
    """The `engine:` section of a stage as `kind`; raises OptionsError naming the stage, the key and the nearest one."""
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        hint = nearest_key(str(error), field_names(kind))
        raise OptionsError(f"stage '{stage}', engine options: {error}{hint}") from None


@dataclass(eq=False, slots=True)
class Run:
    """One request inside one stage. Made by the worker; read by the engine, which may hang its state on `state`.

    upstream    stages that will feed this run; empty for an entry stage, which works from `request` and `inputs`
    wanted      outputs of this stage that the client asked for; others are dropped by the worker
    feeds       True if a consumer stage takes this run's chunks
    blocked     set by the worker: a consumer's window is full. An engine that can pause a run skips it meanwhile
    """

    id: bytes
    request_id: str
    request: GenerateRequest
    inputs: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    upstream: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()
    feeds: bool = False
    blocked: bool = False
    state: Any = None

    def options(self, stage: str) -> dict[str, Any]:
        """The request's own options for `stage`."""
        return self.request.stages.get(stage, {})


# --- events a step returns -----------------------------------------------------------------------------------
@dataclass(slots=True)
class EngineChunk:
    """A chunk for every consumer of this stage. After `last` nothing more may be sent."""

    run: Run
    tensors: tuple[Tensor, ...] = ()
    piece: OutputPiece | None = None
    last: bool = False


@dataclass(slots=True)
class EngineOutput:
    """A piece for the client, of the pipeline's output of the piece's kind; `tensors` holds its samples or pixels."""

    run: Run
    piece: OutputPiece
    tensors: tuple[Tensor, ...] = ()


@dataclass(slots=True)
class EngineProgress:
    """A run that has no output yet is alive: denoising step 7 of 50, second 30 of 60 of the audio."""

    run: Run
    done: float
    total: float = 0.0


@dataclass(slots=True)
class EngineFinished:
    """The run is complete and the engine has dropped it. The worker ends open edges with an empty last chunk."""

    run: Run
    reason: str = "stop"
    usage: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(slots=True)
class EngineFailed:
    """The run failed and the engine has dropped it; other runs go on."""

    run: Run
    error: OmniError


EngineEvent = EngineChunk | EngineOutput | EngineProgress | EngineFinished | EngineFailed


class Engine(Protocol):
    """The contract of every engine; tests/kit/engine_contract.py checks it."""

    def open(self, run: Run) -> None:
        """Take a run. Raises BadRequest (nothing kept) if the request cannot be served."""
        ...

    def feed(self, run: Run, inputs: Any, last: bool) -> bool:
        """Offer what the edge's adapter made of one chunk (`last`: the edge is complete).

        False means "not now": the worker keeps the chunk unacknowledged (the producer feels it as back-pressure)
        and offers it again after the next step. What must outlive this call is copied here.
        """
        ...

    def stop(self, run: Run) -> None:
        """Forget a run at once; no event for it may follow."""
        ...

    def step(self) -> Sequence[EngineEvent]:
        """Advance every run that can advance by one step and return what came of it."""
        ...

    @property
    def has_work(self) -> bool:
        """True if `step` would do work now; False lets the loop sleep until a message arrives or the engine, whose
        own threads have done something, calls its context's `wake`."""
        ...

    def close(self) -> None:
        """Free everything; called once."""
        ...
