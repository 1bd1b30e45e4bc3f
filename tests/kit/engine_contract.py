# SPDX-License-Identifier: Apache-2.0
"""The contract of an engine in code (triton_omni.backends.core.engine.Engine): what the worker's loop relies on.

@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_contract(check):
    check(MY_ENGINE)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from triton_omni.backends.core.engine import (
    Engine,
    EngineChunk,
    EngineEvent,
    EngineFailed,
    EngineFinished,
    EngineOutput,
    Run,
)
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Subject:
    """An engine under test.

    make       a fresh engine
    request    a request that takes more than one step and ends by itself
    refused    a request that `open` must refuse with BadRequest; None if there is none
    upstream   the stage that feeds it; "" for an entry stage
    inputs     what the edge's adapter would make of each chunk, the last one with last=True
    wanted     outputs of the stage
    feeds      True if consumers take its chunks
    """

    make: Callable[[], Engine]
    request: GenerateRequest
    refused: GenerateRequest | None = None
    upstream: str = ""
    inputs: tuple[Any, ...] = ()
    wanted: frozenset[str] = frozenset()
    feeds: bool = True
    same: Callable[[EngineEvent], Any] = lambda event: (type(event).__name__, str(getattr(event, "piece", "")))

    def run(self, request: GenerateRequest | None = None) -> Run:
        upstream = frozenset({self.upstream} - {""})
        return Run(os.urandom(16), "r", request or self.request, {}, upstream, self.wanted, self.feeds)


def feed_all(engine: Engine, subject: Subject, runs: list[Run]) -> dict[bytes, list[EngineEvent]]:
    """Drive runs to their end as the worker does; returns their events."""
    events: dict[bytes, list[EngineEvent]] = {run.id: [] for run in runs}
    waiting = {run.id: list(subject.inputs) for run in runs}
    open_runs = {run.id: run for run in runs}
    deadline = time.monotonic() + PATIENCE_S
    while open_runs:
        for run in open_runs.values():
            left = waiting[run.id]
            while left and engine.feed(run, left[0], len(left) == 1):
                left.pop(0)
        assert engine.has_work or any(waiting.values()), (
            "runs are open, none waits for input, and the engine has no work"
        )
        for event in engine.step():
            assert event.run.id in open_runs, "an event of a run that has ended"
            events[event.run.id].append(event)
            if isinstance(event, EngineFinished | EngineFailed):
                del open_runs[event.run.id]
        assert time.monotonic() < deadline, "the runs do not end"
    return events


def a_run_ends_once_and_names_only_itself(subject: Subject) -> None:
    engine = subject.make()
    run = subject.run()
    engine.open(run)
    events = feed_all(engine, subject, [run])[run.id]
    assert sum(isinstance(e, EngineFinished | EngineFailed) for e in events) == 1
    assert isinstance(events[-1], EngineFinished), events[-1]
    assert all(e.run is run for e in events)
    assert {e.piece.kind for e in events if isinstance(e, EngineOutput)} <= subject.wanted
    lasts = [i for i, e in enumerate(e for e in events if isinstance(e, EngineChunk)) if e.last]
    assert len(lasts) <= 1
    assert not engine.has_work
    engine.close()


def runs_side_by_side_give_the_same_as_alone(subject: Subject) -> None:
    engine = subject.make()
    alone = subject.run()
    engine.open(alone)
    expected = [subject.same(e) for e in feed_all(engine, subject, [alone])[alone.id]]
    runs = [subject.run() for _ in range(4)]
    for run in runs:
        engine.open(run)
    for events in feed_all(engine, subject, runs).values():
        assert [subject.same(e) for e in events] == expected
    engine.close()


def a_stopped_run_emits_nothing_more(subject: Subject) -> None:
    engine = subject.make()
    stopped, other = subject.run(), subject.run()
    engine.open(stopped)
    engine.open(other)
    left = list(subject.inputs)
    if left:
        engine.feed(stopped, left[0], False)
    if engine.has_work:
        engine.step()
    engine.stop(stopped)
    engine.stop(stopped)
    events = feed_all(engine, subject, [other])
    assert isinstance(events[other.id][-1], EngineFinished)
    assert not engine.has_work
    engine.close()


def a_refused_run_leaves_nothing(subject: Subject) -> None:
    if subject.refused is None:
        return
    engine = subject.make()
    with pytest.raises(BadRequest) as caught:
        engine.open(subject.run(subject.refused))
    assert caught.value.where
    assert not engine.has_work
    run = subject.run()
    engine.open(run)
    feed_all(engine, subject, [run])
    engine.close()


def an_idle_engine_makes_nothing(subject: Subject) -> None:
    engine = subject.make()
    assert not engine.has_work
    assert list(engine.step()) == []
    engine.close()


CHECKS: tuple[Callable[[Subject], None], ...] = (
    a_run_ends_once_and_names_only_itself,
    runs_side_by_side_give_the_same_as_alone,
    a_stopped_run_emits_nothing_more,
    a_refused_run_leaves_nothing,
    an_idle_engine_makes_nothing,
)


def check_name(check: Callable[[Subject], None]) -> str:
    return check.__name__


__all__ = ["CHECKS", "Subject", "check_name", "feed_all"]
