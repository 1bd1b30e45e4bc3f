# SPDX-License-Identifier: Apache-2.0
"""Drives engines in the test's own process, as the worker's loop would: open, feed, step, read the events."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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

STEP_LIMIT = 20_000


def new_run(
    request: GenerateRequest | None = None, upstream: Iterable[str] = (), inputs: dict[str, Tensor] | None = None
) -> Run:
    """A run that feeds a consumer and whose outputs are all wanted."""
    return Run(
        os.urandom(16),
        "test",
        request or GenerateRequest(),
        inputs or {},
        frozenset(upstream),
        wanted=frozenset({"text", "audio"}),
        feeds=True,
    )


def step_until_idle(engine: Engine) -> dict[Run, list[EngineEvent]]:
    """Step until nothing is left to do; events by run, in order."""
    events: dict[Run, list[EngineEvent]] = {}
    for _ in range(STEP_LIMIT):
        if not engine.has_work:
            return events
        for event in engine.step():
            events.setdefault(event.run, []).append(event)
    raise AssertionError("the engine never became idle")


def feed_all(engine: Engine, run: Run, inputs: Sequence[Any], after: Callable[[list[EngineEvent]], None]) -> None:
    """Offer `inputs` one after the other, the last one as last, stepping in between; `after` gets what came out."""
    for place, given in enumerate(inputs):
        for _ in range(STEP_LIMIT):
            if engine.feed(run, given, place + 1 == len(inputs)):
                break
            after(list(engine.step()))
        else:
            raise AssertionError("the engine never took the input")
        for _ in range(STEP_LIMIT):
            if not engine.has_work:
                break
            after(list(engine.step()))


def run_with(engine: Engine, run: Run, inputs: Sequence[Any] = ()) -> list[EngineEvent]:
    """All events of one run alone."""
    engine.open(run)
    events: list[EngineEvent] = []
    feed_all(engine, run, inputs, events.extend)
    return events + step_until_idle(engine).get(run, [])


def codes_chunk(codes: np.ndarray | None, last: bool = False) -> Chunk:
    """A chunk as the talker sends it; None for an empty one."""
    tensors = () if codes is None else (Tensor.of("codes", codes),)
    return Chunk(b"", "talker->code2wav", last=last, tensors=tensors)


def array(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor.data, tensor.spec.dtype).reshape(tensor.spec.shape)


def audio(events: Iterable[EngineEvent]) -> np.ndarray:
    """The audio of a run's outputs, joined."""
    pieces = [array(t) for e in events if isinstance(e, EngineOutput) and e.piece.kind == "audio" for t in e.tensors]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


def codes(events: Iterable[EngineEvent]) -> list[np.ndarray]:
    """The codes of a run's chunks, one array a chunk."""
    return [array(t) for e in events if isinstance(e, EngineChunk) for t in e.tensors if t.name == "codes"]


def end(events: Sequence[EngineEvent]) -> EngineFinished | EngineFailed:
    """The run's end: its last event, and there is no other."""
    ends = [e for e in events if isinstance(e, EngineFinished | EngineFailed)]
    assert len(ends) == 1 and events[-1] is ends[0], f"not exactly one end at the end: {events}"
    return ends[0]
