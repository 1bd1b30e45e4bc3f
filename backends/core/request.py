# SPDX-License-Identifier: Apache-2.0
"""One request's life as a pure state machine: events in, actions out. No I/O, no clock, no threads.

Rule 1: everything that decides how a request goes on lives in this file.
Rule 2: this file does not know how anything is done.

The life of one stage's run, and who moves it on:

    IDLE ──Open──► OPENING ──Accepted──► RUNNING ──Finished / Failed──► CLOSED
                      └────────Failed, OpenFailed─────────────────────────┘

Stages are opened one after the other, consumers first, because a producer's Open carries the addresses of the
consumer instances that accepted. A request ends exactly once; after its end only Stop, Release, Close and Done
follow. It is Done, and may be forgotten, when every run it opened is closed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from triton_omni.backends.core.errors import Cancelled, OmniError, StageFailed
from triton_omni.backends.core.pipeline import Pipeline

STOPPED = "stopped"
"""Reason of a run that ended because of a Stop."""


class RunState(Enum):
    IDLE = "idle"
    OPENING = "opening"
    RUNNING = "running"
    CLOSED = "closed"


class Outcome(Enum):
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


# --- events: what happened -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """The request was admitted."""


@dataclass(frozen=True, slots=True)
class RunAccepted:
    """A stage's worker took the run."""

    stage: str


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """A run could not be opened: no worker has it and nothing more will be heard of it."""

    stage: str
    error: OmniError


@dataclass(frozen=True, slots=True)
class OutputArrived:
    """A piece of an output came in; `item` must be emitted or released, exactly once."""

    output: str
    item: Any


@dataclass(frozen=True, slots=True)
class RunFinished:
    """A run came to its natural end (also after a Stop)."""

    stage: str
    reason: str
    usage: dict[str, float]


@dataclass(frozen=True, slots=True)
class RunFailed:
    """A run failed and is closed. `lost`: its worker died, so nobody will close it from the other side."""

    stage: str
    error: OmniError
    lost: bool = False


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller aborted or went away."""

    reason: str = "abort"


@dataclass(frozen=True, slots=True)
class RequestExpired:
    """A deadline passed, or a limit of this request was exceeded."""

    error: OmniError


RequestEvent = (
    RequestAdmitted
    | RunAccepted
    | OpenFailed
    | OutputArrived
    | RunFinished
    | RunFailed
    | RequestCancelled
    | RequestExpired
)


# --- actions: what to do -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class OpenRun:
    stage: str


@dataclass(frozen=True, slots=True)
class EmitOutput:
    output: str
    index: int
    item: Any


@dataclass(frozen=True, slots=True)
class ReleaseOutput:
    item: Any


@dataclass(frozen=True, slots=True)
class StopRun:
    stage: str


@dataclass(frozen=True, slots=True)
class CloseRun:
    """The run is over on both sides. `lost`: its worker died, so its Triton stream may never end."""

    stage: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class EndRequest:
    """The one end of a request, under the identity (`output`, `stage`) of its own final output."""

    outcome: Outcome
    output: str
    stage: str
    finish_reason: str
    usage: dict[str, float]
    error: OmniError | None = None


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """Nothing more will happen: forget the request."""


RequestAction = OpenRun | EmitOutput | ReleaseOutput | StopRun | CloseRun | EndRequest | ForgetRequest


@dataclass(eq=False)
class RequestMachine:
    """One request's state. `wanted` and `needed` are set at admission from the pipeline; the rest by events."""

    pipeline: Pipeline
    wanted: frozenset[str]
    needed: frozenset[str]
    outcome: Outcome | None = None
    runs: dict[str, RunState] = field(init=False)
    emitted: dict[str, int] = field(init=False)
    usage: dict[str, float] = field(default_factory=dict[str, float])
    reasons: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self.runs = dict.fromkeys(self.pipeline.consumers_first(self.needed), RunState.IDLE)
        self.emitted = dict.fromkeys((o.name for o in self.pipeline.outputs if o.name in self.wanted), 0)

    @property
    def final_output(self) -> str:
        """The wanted output that ends last: the one declared last in the pipeline."""
        return list(self.emitted)[-1]

    @property
    def open_runs(self) -> list[str]:
        """Stages whose runs are opening or running."""
        return [s for s, state in self.runs.items() if state in (RunState.OPENING, RunState.RUNNING)]

    def on(self, event: RequestEvent) -> list[RequestAction]:
        """Take one event, return what has to be done, in order."""
        match event:
            case RequestAdmitted():
                return self._open_next()
            case RunAccepted(stage):
                return self._accepted(stage)
            case OutputArrived(output, item):
                return self._arrived(output, item)
            case RunFinished(stage, reason, usage):
                return self._finished(stage, reason, usage)
            case OpenFailed(stage, error):
                return self._closed(stage, lost=False, error=error)
            case RunFailed(stage, error, lost):
                return self._closed(stage, lost, error)
            case RequestCancelled(reason):
                return self._cut(Outcome.CANCELLED, Cancelled(reason))
            case RequestExpired(error):
                return self._cut(Outcome.FAILED, error)

    def _open_next(self) -> list[RequestAction]:
        """Open the next stage, unless one is still opening or the request is over."""
        if self.outcome is not None or RunState.OPENING in self.runs.values():
            return []
        for stage, state in self.runs.items():
            if state is RunState.IDLE:
                self.runs[stage] = RunState.OPENING
                return [OpenRun(stage)]
        return []

    def _accepted(self, stage: str) -> list[RequestAction]:
        if self.runs[stage] is not RunState.OPENING:
            return []
        self.runs[stage] = RunState.RUNNING
        # A run accepted after the end was opened before it: nobody told it to stop yet.
        return self._open_next() if self.outcome is None else [StopRun(stage)]

    def _arrived(self, output: str, item: Any) -> list[RequestAction]:
        if self.outcome is not None or output not in self.emitted:
            return [ReleaseOutput(item)]
        index = self.emitted[output]
        self.emitted[output] = index + 1
        return [EmitOutput(output, index, item)]

    def _finished(self, stage: str, reason: str, usage: dict[str, float]) -> list[RequestAction]:
        if self.runs[stage] not in (RunState.OPENING, RunState.RUNNING):
            return []
        if self.outcome is None and (reason == STOPPED or self.runs[stage] is RunState.OPENING):
            text = "stopped without being asked to" if reason == STOPPED else "ended before it was accepted"
            return self._closed(stage, lost=False, error=StageFailed(text, stage))
        self.runs[stage] = RunState.CLOSED
        if self.outcome is None:
            self.reasons[stage] = reason
            for name, count in usage.items():
                self.usage[name] = self.usage.get(name, 0) + count
        actions: list[RequestAction] = [CloseRun(stage)]
        if all(self.runs[self.pipeline.output(o).stage] is RunState.CLOSED for o in self.emitted):
            actions += self._end(Outcome.COMPLETED)
        return actions + self._done()

    def _closed(self, stage: str, lost: bool, error: OmniError) -> list[RequestAction]:
        if self.runs[stage] not in (RunState.OPENING, RunState.RUNNING):
            return []
        self.runs[stage] = RunState.CLOSED
        ended = self._end(Outcome.FAILED, error if error.where else type(error)(error.message, stage))
        return [CloseRun(stage, lost), *ended, *self._done()]

    def _cut(self, outcome: Outcome, error: OmniError) -> list[RequestAction]:
        """End from outside; nothing if the request has ended already."""
        return self._end(outcome, error) + self._done() if self.outcome is None else []

    def _end(self, outcome: Outcome, error: OmniError | None = None) -> list[RequestAction]:
        if self.outcome is not None:
            return []
        self.outcome = outcome
        running = [s for s, state in self.runs.items() if state is RunState.RUNNING]
        return [*(StopRun(s) for s in running), self._end_action(outcome, error)]

    def _end_action(self, outcome: Outcome, error: OmniError | None) -> EndRequest:
        stage = self.pipeline.output(self.final_output).stage
        first = self.pipeline.output(next(iter(self.emitted))).stage
        reason = {
            Outcome.COMPLETED: self.reasons.get(first) or self.reasons.get(stage, "stop"),
            Outcome.CANCELLED: "abort",
            Outcome.FAILED: "error",
        }[outcome]
        return EndRequest(outcome, self.final_output, stage, reason, dict(self.usage), error)

    def _done(self) -> list[RequestAction]:
        return [ForgetRequest()] if self.outcome is not None and not self.open_runs else []
