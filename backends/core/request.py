# SPDX-License-Identifier: Apache-2.0
"""One request's life as a pure state machine: events in, actions out. No I/O, no clock, no threads.

Rule 1: everything that decides how a request goes on lives in this file.
Rule 2: this file does not know how anything is done.

The life of one stage's run, and who moves it on:

    IDLE ──OpenRun──► OPENING ──RunAccepted──► RUNNING ──RunFinished / RunFailed──► CLOSED
                         └────────────RunFailed, OpenFailed────────────────────────────┘

All stages are opened at once, producers first: they have the most to do before the first output. A producer gets to
know each consumer's instance when both have accepted (`ConnectConsumer`). A request ends exactly once (`EndRequest`);
after it only `StopRun`, `ReleaseOutput`, `CloseRun` and `ForgetRequest` follow. `ForgetRequest` comes when every run
that was opened is closed.

Beside outputs that the request needs there may be optional ones. A stage that leads to optional outputs alone may fail
or be late: these outputs end with a reason (`missing`), the runs that only they need are stopped, the rest goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from triton_omni.backends.core.errors import Cancelled, OmniError, StageFailed
from triton_omni.backends.core.pipeline import Pipeline

STOPPED = "stopped"
"""Reason of a run that ended because of a `StopMessage`."""


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
    """A run could not be opened: no worker has it and no event of it follows."""

    stage: str
    error: OmniError


@dataclass(frozen=True, slots=True)
class OutputArrived:
    """A piece of an output came in; `item` must be emitted or released, exactly once."""

    output: str
    item: object


@dataclass(frozen=True, slots=True)
class RunFinished:
    """A run came to its natural end (also after a Stop)."""

    stage: str
    reason: str
    usage: dict[str, float]


@dataclass(frozen=True, slots=True)
class RunFailed:
    """A run failed and is closed. `lost`: its worker died and cannot close it from the other side."""

    stage: str
    error: OmniError
    lost: bool = False


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller aborted or went away."""

    reason: str = "abort"


@dataclass(frozen=True, slots=True)
class RequestExpired:
    """A deadline passed, or a limit of this request was exceeded.

    stalled  a stage is silent: if optional outputs have not ended, they are given up before the request is
    """

    error: OmniError
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class RequestSuperseded:
    """The request runs again under another machine: stop what runs here, without an end for the client."""


RequestEvent = (
    RequestAdmitted
    | RunAccepted
    | OpenFailed
    | OutputArrived
    | RunFinished
    | RunFailed
    | RequestCancelled
    | RequestExpired
    | RequestSuperseded
)


# --- actions: what to do -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class OpenRun:
    stage: str


@dataclass(frozen=True, slots=True)
class EmitOutput:
    output: str
    index: int
    item: object


@dataclass(frozen=True, slots=True)
class ReleaseOutput:
    item: object


@dataclass(frozen=True, slots=True)
class StopRun:
    stage: str


@dataclass(frozen=True, slots=True)
class ConnectConsumer:
    """A stage may send to one of its consumers: both have accepted."""

    stage: str
    consumer: str


@dataclass(frozen=True, slots=True)
class DropConsumer:
    """A stage goes on without one of its consumers."""

    stage: str
    consumer: str


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
    missing: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """Nothing more will happen: forget the request."""


RequestAction = (
    OpenRun
    | EmitOutput
    | ReleaseOutput
    | StopRun
    | ConnectConsumer
    | DropConsumer
    | CloseRun
    | EndRequest
    | ForgetRequest
)


@dataclass(eq=False)
class RequestMachine:
    """One request's state. `wanted` and `needed` are set at admission from the pipeline; the rest by events.

    missing   optional outputs that were given up → why
    unneeded  stages that no output needs any more
    """

    pipeline: Pipeline
    wanted: frozenset[str]
    needed: frozenset[str]
    outcome: Outcome | None = None
    runs: dict[str, RunState] = field(init=False)
    emitted: dict[str, int] = field(init=False)
    usage: dict[str, float] = field(default_factory=dict[str, float])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    missing: dict[str, str] = field(default_factory=dict[str, str])
    unneeded: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.runs = dict.fromkeys(self.pipeline.consumers_first(self.needed), RunState.IDLE)
        self.emitted = dict.fromkeys((o.name for o in self.pipeline.outputs if o.name in self.wanted), 0)

    @property
    def final_output(self) -> str:
        """The wanted output that ends last: the one declared last in the pipeline, an optional one only if alone."""
        return (self._required or list(self.emitted))[-1]

    @property
    def only_optional_left(self) -> bool:
        """True if the request waits for nothing but optional outputs."""
        return self.outcome is None and bool(self._required) and self._all_closed(self._required)

    @property
    def opening(self) -> list[str]:
        """Stages that the request needs and that have not accepted yet; none once it has ended."""
        if self.outcome is not None or RunState.OPENING not in self.runs.values():
            return []
        return [s for s, state in self.runs.items() if state is RunState.OPENING and not self.is_optional(s)]

    @property
    def open_runs(self) -> list[str]:
        """Stages whose runs are opening or running."""
        return [s for s, state in self.runs.items() if state in (RunState.OPENING, RunState.RUNNING)]

    def is_optional(self, stage: str) -> bool:
        """True if the request can go on without a stage."""
        return bool(self._required) and set(self._required).isdisjoint(self._led_to_by(stage))

    def on(self, event: RequestEvent) -> list[RequestAction]:
        """Take one event, return what has to be done, in order."""
        match event:
            case RequestAdmitted():
                return self._open_all()
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
            case RequestSuperseded():
                return self._end(Outcome.CANCELLED)[:-1] + self._done()
            case RequestExpired(error, stalled):
                left = [
                    o for o in self.emitted if o not in (*self._required, *self.missing) and not self._all_closed([o])
                ]
                if stalled and self.outcome is None and self._required and left:
                    return self._give_up(left, error)
                return self._cut(Outcome.FAILED, error)

    def _open_all(self) -> list[RequestAction]:
        """Open every stage, unless the request is over."""
        idle = [stage for stage, state in reversed(self.runs.items()) if state is RunState.IDLE]
        if self.outcome is not None:
            return []
        self.runs |= dict.fromkeys(idle, RunState.OPENING)
        return [OpenRun(stage) for stage in idle]

    def _accepted(self, stage: str) -> list[RequestAction]:
        if self.runs[stage] is not RunState.OPENING:
            return []
        self.runs[stage] = RunState.RUNNING
        # A run accepted after the end was opened before it: no stop was sent to it yet.
        if self.outcome is not None or stage in self.unneeded:
            return [StopRun(stage)]
        running = {s for s, state in self.runs.items() if state is RunState.RUNNING} - self.unneeded
        gone = {s for s, state in self.runs.items() if state is RunState.CLOSED} | self.unneeded
        pipeline = self.pipeline
        return [
            *(DropConsumer(stage, consumer) for consumer in sorted(pipeline.downstream(stage, gone))),
            *(ConnectConsumer(producer, stage) for producer in sorted(pipeline.upstream(stage, running))),
            *(ConnectConsumer(stage, consumer) for consumer in sorted(pipeline.downstream(stage, running))),
        ]

    def _arrived(self, output: str, item: object) -> list[RequestAction]:
        if self.outcome is not None or output not in self.emitted or output in self.missing:
            return [ReleaseOutput(item)]
        index = self.emitted[output]
        self.emitted[output] = index + 1
        return [EmitOutput(output, index, item)]

    def _finished(self, stage: str, reason: str, usage: dict[str, float]) -> list[RequestAction]:
        if self.runs[stage] not in (RunState.OPENING, RunState.RUNNING):
            return []
        unneeded = stage in self.unneeded
        if self.outcome is None and not unneeded and (reason == STOPPED or self.runs[stage] is RunState.OPENING):
            text = "stopped without being asked to" if reason == STOPPED else "ended before it was accepted"
            return self._closed(stage, lost=False, error=StageFailed(text, stage))
        self.runs[stage] = RunState.CLOSED
        if self.outcome is None and not unneeded:
            self.reasons[stage] = reason
            for name, count in usage.items():
                self.usage[name] = self.usage.get(name, 0) + count
        return [CloseRun(stage), *self._completed()]

    def _closed(self, stage: str, lost: bool, error: OmniError) -> list[RequestAction]:
        if self.runs[stage] not in (RunState.OPENING, RunState.RUNNING):
            return []
        self.runs[stage] = RunState.CLOSED
        error = error if error.where else type(error)(error.message, stage)
        if self.outcome is None and self.is_optional(stage):
            return [CloseRun(stage, lost), *self._give_up(self._led_to_by(stage), error)]
        return [CloseRun(stage, lost), *self._end(Outcome.FAILED, error), *self._done()]

    def _give_up(self, outputs: list[str], error: OmniError) -> list[RequestAction]:
        """Go on without optional outputs: stop the runs that only they need, and feed these no more."""
        self.missing |= {o: error.line() for o in outputs if o not in self.missing}
        needed = frozenset[str]().union(
            *(self.pipeline.leading_to(self.pipeline.output(o).stage) for o in self.emitted if o not in self.missing)
        )
        freed = [s for s in self.runs if s not in needed and s not in self.unneeded]
        self.unneeded.update(freed)
        actions: list[RequestAction] = [StopRun(s) for s in freed if self.runs[s] is RunState.RUNNING]
        for stage in freed:
            if self.runs[stage] is RunState.IDLE:
                self.runs[stage] = RunState.CLOSED
        running = [s for s in self.runs if self.runs[s] is RunState.RUNNING and s not in self.unneeded]
        dropped = [DropConsumer(s, c) for s in running for c in sorted(self.pipeline.downstream(s, self.unneeded))]
        return [*actions, *dropped, *self._completed()]

    def _completed(self) -> list[RequestAction]:
        """End the request if all its outputs have ended; forget it if all runs have."""
        if self._all_closed([o for o in self.emitted if o not in self.missing]):
            return self._end(Outcome.COMPLETED) + self._done()
        return self._done()

    @property
    def _required(self) -> list[str]:
        """Wanted outputs that are not optional. None: the optional ones were all that was asked for, so they count."""
        return [o for o in self.emitted if not self.pipeline.output(o).optional]

    def _led_to_by(self, stage: str) -> list[str]:
        return [o for o in self.emitted if stage in self.pipeline.leading_to(self.pipeline.output(o).stage)]

    def _all_closed(self, outputs: list[str]) -> bool:
        return all(self.runs[self.pipeline.output(o).stage] is RunState.CLOSED for o in outputs)

    def _cut(self, outcome: Outcome, error: OmniError) -> list[RequestAction]:
        """End from outside; nothing if the request has ended already."""
        return self._end(outcome, error) + self._done() if self.outcome is None else []

    def _end(self, outcome: Outcome, error: OmniError | None = None) -> list[RequestAction]:
        if self.outcome is not None:
            return []
        self.outcome = outcome
        running = [s for s, state in self.runs.items() if state is RunState.RUNNING and s not in self.unneeded]
        return [*(StopRun(s) for s in running), self._end_action(outcome, error)]

    def _end_action(self, outcome: Outcome, error: OmniError | None) -> EndRequest:
        stage = self.pipeline.output(self.final_output).stage
        first = self.pipeline.output(next(iter(self.emitted))).stage
        reason = {
            Outcome.COMPLETED: self.reasons.get(first) or self.reasons.get(stage, "stop"),
            Outcome.CANCELLED: "abort",
            Outcome.FAILED: "error",
        }[outcome]
        return EndRequest(outcome, self.final_output, stage, reason, dict(self.usage), error, dict(self.missing))

    def _done(self) -> list[RequestAction]:
        return [ForgetRequest()] if self.outcome is not None and not self.open_runs else []
