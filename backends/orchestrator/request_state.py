# SPDX-License-Identifier: Apache-2.0
"""One request in the orchestrator: its machine and everything that is bound to it. Dropping it ends it."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial

import msgspec

from triton_omni.backends.config.schema import OrchestratorDeploy
from triton_omni.backends.control.hub import Peer
from triton_omni.backends.control.messages import RunStats, Transfer
from triton_omni.backends.core.chunk import Tensor, TensorSpec
from triton_omni.backends.core.errors import BadRequest, DeadlineExceeded
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.output_window import OutputWindow
from triton_omni.backends.core.outputs import JOIN, OutputPiece
from triton_omni.backends.core.request import EndRequest, Outcome, RequestEvent, RequestMachine
from triton_omni.backends.core.responses import Event, RequestStatus, Response, ResponseStream
from triton_omni.backends.orchestrator.input_feed import InputFeed
from triton_omni.backends.orchestrator.metrics import Player


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request as it came from Triton.

    media        its media tensors by name
    is_operator  it came with the operator's key
    """

    responses: ResponseStream
    request_id: str
    request: GenerateRequest
    media: Mapping[str, Tensor]
    traceparent: str = ""
    is_short_form: bool = False
    is_operator: bool = False


@dataclass(frozen=True, slots=True)
class RequestDeadlines:
    """The request's deadlines in seconds, 0 = none: its own where given, else the deploy's."""

    queue_s: float
    first_output_s: float
    stall_s: float
    total_s: float
    optional_s: float

    @classmethod
    def of(cls, request: GenerateRequest, deploy: OrchestratorDeploy) -> RequestDeadlines:
        own = msgspec.to_builtins(request.deadlines)
        return cls(**{limit.name: own.get(limit.name, getattr(deploy, limit.name)) for limit in fields(cls)})


@dataclass
class Collected:
    """Outputs of a request with stream=false, joined into its one response. Previews are left out."""

    pieces: dict[str, list[OutputPiece]]
    nbytes: int = 0
    tensors: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])

    def add(self, piece: OutputPiece, tensors: Sequence[Tensor]) -> None:
        """Copy one piece: its chunk goes back to the stage at once."""
        if piece.is_preview:
            return
        self.pieces[piece.kind].append(piece)
        for tensor in tensors:
            self.nbytes += tensor.spec.nbytes
            copied = Tensor(tensor.spec, bytes(memoryview(tensor.data).cast("B")) if tensor.spec.nbytes else b"")
            self.tensors.setdefault(tensor.name, []).append(copied)

    def joined_pieces(self) -> dict[str, OutputPiece]:
        """Output → its pieces as one."""
        joined = {output: JOIN[output](pieces) for output, pieces in self.pieces.items()}
        return {output: piece for output, piece in joined.items() if piece is not None}

    def joined_tensors(self) -> tuple[Tensor, ...]:
        """Tensors of one output along their first axis; images are stacked below each other likewise."""
        joined: list[Tensor] = []
        for name, pieces in self.tensors.items():
            spec = pieces[0].spec
            rows = sum(p.spec.shape[0] for p in pieces)
            whole = TensorSpec(name, spec.dtype, (rows, *spec.shape[1:]))
            joined.append(Tensor(whole, b"".join(p.data for p in pieces)))
        return tuple(joined)


class HandleState(Enum):
    """What has become of the opener's handle of a run."""

    OPENING = "opening"  # the opener has not answered yet
    OPEN = "open"
    CLOSE_LATER = "close later"  # the run has ended: the handle is closed when the opener brings it
    ABANDON_LATER = "abandon later"  # its worker died: the handle is abandoned when the opener brings it
    GONE = "gone"  # closed or abandoned, or there will be none


_LATER = (HandleState.CLOSE_LATER, HandleState.ABANDON_LATER)


@dataclass(eq=False, slots=True)
class StageRun:
    """One run of a request, from its OpenMessage on.

    stub         link to its stub, as soon as the stub has received it
    worker       link to its worker, once the worker has accepted it
    address      where that worker listens
    accepted_s   when the run was known to be in a worker
    worker_died  the stub says so
    stats        what its worker measured, once it has ended
    """

    stub: Peer | None = None
    worker: Peer | None = None
    address: str = ""
    accepted_s: float | None = None
    handle: object = None
    handle_state: HandleState = HandleState.OPENING
    worker_died: bool = False
    stats: RunStats | None = None

    @property
    def peer(self) -> Peer | None:
        """The link that reports the run's end, or its loss."""
        return self.worker or self.stub


@dataclass(eq=False, slots=True)
class Sent:
    """What was sent of one output: when the first and the latest piece came, and what they were in all."""

    first_s: float
    last_s: float
    transfer: Transfer = field(default_factory=Transfer)


@dataclass(eq=False, slots=True, kw_only=True)
class RequestState:
    """One request from its arrival until it is forgotten.

    run        names this attempt in all processes
    encoded    the request as stages get it
    runs       by stage, of the stages that were opened
    refusing   stages that may refuse the request when they open: no output leaves before they have accepted
    unready    stages that were not ready when the request arrived: none leaves before they have received it
    sent       by output
    feed       the input that its client streams; None: it came whole
    window     how far a stream may be ahead of its client; None for one joined answer
    deferred   outputs and ends of runs that wait for the client, with their bytes
    blocked_s  since when they wait without an acknowledgment
    delivered  usage counts of what was sent, for a request that ends early
    end        set once, with `ended_s`
    token      what an abort must bring; `token_sent` once an event has carried it
    was_repeated  this is the second attempt, after a worker of a pool had died
    """

    run: bytes
    arrival: Arrival
    encoded: bytes
    machine: RequestMachine
    limits: RequestDeadlines
    arrived_s: float
    unready: frozenset[str]
    admitted_s: float | None = None
    ended_s: float | None = None
    last_activity_s: float = 0.0
    runs: dict[str, StageRun] = field(default_factory=dict[str, StageRun])
    sent: dict[str, Sent] = field(default_factory=dict[str, Sent])
    collected: Collected | None = None
    feed: InputFeed | None = None
    window: OutputWindow | None = None
    deferred: deque[tuple[RequestEvent, int]] = field(default_factory=deque[tuple[RequestEvent, int]])
    blocked_s: float | None = None
    delivered: dict[str, float] = field(default_factory=dict[str, float])
    player: Player = field(default_factory=Player)
    end: EndRequest | None = None
    token: str = field(default_factory=partial(secrets.token_hex, 8))
    token_sent: bool = False
    was_repeated: bool = False
    refusing: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        pipeline, request = self.machine.pipeline, self.arrival.request
        self.refusing = frozenset(s for s in self.machine.needed if pipeline.may_refuse(s, request))

    def can_begin_again(self, stage: str) -> bool:
        """True if the loss of `stage` may be mended by running the request again: its client has got no output yet."""
        open_ended = self.machine.outcome is None and not self.was_repeated and self.admitted_s is not None
        return open_ended and (not self.sent or self.collected is not None) and not self.machine.is_optional(stage)

    def again(self, run: bytes, machine: RequestMachine) -> RequestState:
        """The same request at the start of a second attempt; the client's window and token stay."""
        collected = None if self.collected is None else Collected({output: [] for output in machine.emitted})
        return replace(
            self, run=run, machine=machine, runs={}, sent={}, collected=collected, deferred=deque(), blocked_s=None,
            delivered={}, player=Player(), was_repeated=True, unready=machine.needed,
        )  # fmt: skip

    def count(self, piece: OutputPiece) -> None:
        """Add a piece that is sent to what was delivered."""
        for name, count in piece.usage().items():
            self.delivered[name] = self.delivered.get(name, 0) + count

    def has_room(self, nbytes: int) -> bool:
        """True if a response of `nbytes` may be sent, or would be dropped because the request has ended."""
        return self.window is None or self.machine.outcome is not None or self.window.has_room(nbytes)

    @property
    def may_be_refused(self) -> bool:
        """True while a refusal may still come as the request's one answer, before any output."""
        return any(
            stage in self.refusing or (stage in self.unready and self.runs[stage].peer is None)
            for stage in self.machine.opening
        )

    def take_token(self) -> str:
        """The token for the request's first event; empty for later ones."""
        is_first, self.token_sent = not self.token_sent, True
        return self.token if is_first else ""

    def mark_sent(self, nbytes: int = 0, playback_s: float = 0.0) -> str:
        """Count a response; returns the token that its reader has to send back, or "" if none is needed."""
        mark = self.window.send(nbytes, playback_s) if self.window is not None else ""
        return f"{self.run.hex()}:{mark}" if mark else ""

    def expired(self, now_s: float) -> DeadlineExceeded | None:
        """The deadline that has passed, if any."""
        limits = self.limits
        if self.window is not None and self.blocked_s is not None:
            passed, limit = now_s - self.blocked_s, limits.stall_s if self.window.acknowledges else 0.0
            where = "client"
        elif self.admitted_s is None:
            passed, limit, where = now_s - self.arrived_s, limits.queue_s, "queue"
        elif self.feed is not None and not self.feed.ended:
            passed, limit = now_s - max(self.last_activity_s, self.feed.active_s), limits.stall_s
            where = "input"
        elif not self.sent:
            passed, limit = now_s - self.admitted_s, limits.first_output_s
            where = f"first output of {self.stuck_at}"
        else:
            limit = limits.optional_s if self.machine.only_optional_left else limits.stall_s
            passed, where = now_s - self.last_activity_s, self.silent_at
        if limit and passed > limit:
            return DeadlineExceeded(f"nothing for {passed:.1f} s (limit {limit:g} s)", where)
        if limits.total_s and now_s - self.arrived_s > limits.total_s:
            return DeadlineExceeded(f"not done after {limits.total_s:g} s", "total")
        return None

    @property
    def forgettable(self) -> bool:
        """True when the machine is done and no handle is expected."""
        over = self.machine.outcome is not None and not self.machine.open_runs
        return over and not any(run.handle_state in _LATER for run in self.runs.values())

    @property
    def phase(self) -> str:
        """Where the request is in its life, in a word."""
        if self.machine.outcome is not None:
            return "ending"
        if self.admitted_s is None:
            return "waiting"
        return "opening" if not self.sent else "answering"

    def status(self, now_s: float) -> RequestStatus:
        """The request for a person who watches the server."""
        return RequestStatus(
            id=self.arrival.request_id,
            operation=self.arrival.request.operation,
            age_s=round(now_s - self.arrived_s, 3),
            phase=self.phase,
            stages=tuple(self.machine.open_runs),
            pieces=dict(self.machine.emitted),
        )

    @property
    def stuck_at(self) -> str:
        """The stage that the request waits for: the first producer that has not ended."""
        producers_first = reversed(list(self.machine.runs))
        return next((s for s in producers_first if s in self.machine.open_runs), self.machine.final_output)

    @property
    def silent_at(self) -> str:
        """Where nothing moves: the edge behind the stage that the request waits for, or the stage if it is the last."""
        stage = self.stuck_at
        waiting = self.machine.pipeline.downstream(stage, self.machine.open_runs)
        return f"{stage}->{min(waiting)}" if waiting else f"stall of {stage}"

    def usage(self, end: EndRequest) -> dict[str, float]:
        """What the stages counted; of a request that ends early also what running stages have delivered."""
        return dict(end.usage) if end.outcome is Outcome.COMPLETED else self.delivered | end.usage

    def last_response(self, end: EndRequest, now_s: float) -> Response:
        """The last response, with the whole output if the client does not stream."""
        timings = {f"first_{name}_s": sent.first_s - self.arrived_s for name, sent in self.sent.items()}
        timings["queue_s"] = (self.admitted_s if self.admitted_s is not None else now_s) - self.arrived_s
        timings["total_s"] = now_s - self.arrived_s
        collected = self.collected
        event = Event(
            "end",
            self.arrival.request_id,
            output=end.output,
            stage=end.stage,
            index=sum(self.machine.emitted.values()),
            joined={} if collected is None else collected.joined_pieces(),
            counts={} if collected is None else {output: len(pieces) for output, pieces in collected.pieces.items()},
            missing=end.missing,
            outcome=end.outcome.value,
            finish_reason=end.finish_reason,
            usage=self.usage(end),
            timings={name: round(value, 6) for name, value in timings.items()},
        )
        return Response(event, () if collected is None else collected.joined_tensors())


def parse_receipt(token: str) -> tuple[bytes, str]:
    """(run, mark) of a token of `RequestState.mark_sent`; raises BadRequest."""
    run, _, mark = token.partition(":")
    try:
        return bytes.fromhex(run), mark
    except ValueError:
        raise BadRequest("an acknowledgment needs the token of the event that was read", "target") from None
