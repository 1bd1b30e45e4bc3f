# SPDX-License-Identifier: Apache-2.0
"""The event loop of a stage's stub, independent of Triton: passes calls to the worker, supervises it, ends calls.

An orchestrator's call is acknowledged on receipt, not when the worker accepts the run, which waits for the end of an
engine step (decision 0008). The end of a run is sent to the orchestrator only after Triton's FINAL: by the worker once
it has sent AcceptedMessage; by this loop, over its own link, before that and if the worker died.

The stage has one worker or a pool of them. A run goes to the worker that `choose` names. If that worker dies before it
has accepted the run, another one takes it, once. While no worker of a pool is ready, runs wait up to their `wait_s`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVarTuple, cast

from triton_omni.backends.config.schema import StageDeploy
from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.hub import Hub, Lost, Peer
from triton_omni.backends.control.records import State
from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.errors import (
    BadRequest,
    Cancelled,
    ErrorInfo,
    Internal,
    OmniError,
    Unavailable,
    WorkerDied,
    describe,
)
from triton_omni.backends.core.generate import decode_request
from triton_omni.backends.core.output_window import OutputWindow
from triton_omni.backends.core.pipeline import Stage
from triton_omni.backends.core.responses import Event, Response, ResponseStream
from triton_omni.backends.stub.choose import by_affinity, least_live
from triton_omni.backends.stub.external_worker import ExternalWorker
from triton_omni.backends.stub.worker_process import WorkerProcess

Arguments = TypeVarTuple("Arguments")
log = logging.getLogger("triton_omni.stage")

TURN_S = 0.25
DIRECT_OUTPUT_BYTES = 8 << 20  # window of a direct call, whose client is sent output at a pace (decision 0011)
PUBLISH_S = 5.0  # oldest gauges while calls are open
STOPPED_S = 10.0  # a stopped worker is killed after this
_NOT_READY: dict[State, str] = {
    "starting": "the stage is starting",
    "waiting": "the stage waits for a worker to join",
    "restarting": "the stage is restarting",
    "gave_up": "the stage's worker died too often and is not restarted",
    "stuck": "the stage's worker is stopped",
}


@dataclass(eq=False, slots=True)
class StageCall:
    """One Triton request of this stage.

    inputs     a chunk to send to the worker before `message`; kept until a worker has accepted the run
    reply      the stub's link to the orchestrator; None for a direct call
    worker     has the run, or had it last
    was_moved  a worker died before it had accepted the run
    until_s    how long it may wait for a worker of a pool
    accepted   the worker has accepted the run
    ended      the Triton response stream is closed or being closed
    pieces     output → number of responses sent
    deferred   what waits for the client of a direct call: outputs, which keep their credit, and then the run's end
    """

    responses: ResponseStream
    message: msg.OpenMessage
    inputs: Chunk | None = None
    reply: Peer | None = None
    worker: PoolWorker | None = None
    was_moved: bool = False
    until_s: float = 0.0
    accepted: bool = False
    ended: bool = False
    pieces: dict[str, int] = field(default_factory=dict[str, int])
    window: OutputWindow = field(default_factory=lambda: OutputWindow(DIRECT_OUTPUT_BYTES, acknowledges=False))
    deferred: deque[tuple[Peer, Chunk | msg.FinishedMessage]] = field(
        default_factory=deque[tuple[Peer, Chunk | msg.FinishedMessage]]
    )

    def drop_deferred(self) -> None:
        """Give back what waits for the client: it has left, or the call has failed."""
        while self.deferred:
            worker, item = self.deferred.popleft()
            if isinstance(item, Chunk):
                worker.release(item)


@dataclass(eq=False, slots=True)
class PoolWorker:
    """One worker of the stage. `runs` counts the calls that it has; `is_drained` gives it no further ones.

    peer             the link to it; None while it does not run
    stopped_since_s  since when its process is stopped, if it is
    """

    name: str
    process: WorkerProcess | ExternalWorker
    peer: Peer | None = None
    last_activity_s: float = 0.0
    stopped_since_s: float | None = None
    runs: int = 0
    is_drained: bool = False

    @property
    def state(self) -> State:
        """The process's state; `stuck` while it is stopped."""
        return self.process.state if self.stopped_since_s is None else "stuck"

    @property
    def can_take_runs(self) -> bool:
        return self.peer is not None and self.state == "ready" and not self.is_drained


class StageLoop:
    """Calls and workers of one stage. `turn` runs in one thread; `submit` may be called from any."""

    def __init__(
        self,
        *,
        stage: Stage,
        deploy: StageDeploy,
        workers: Mapping[str, WorkerProcess | ExternalWorker],
        hub: Hub,
        on_ping: Callable[[PoolWorker, msg.PingMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`workers` by name, at least one; `on_ping` is called with each PingMessage of one."""
        self.stage = stage.name
        self._output_tensors = {spec.name for spec in stage.outputs}
        self.hub = hub
        self.workers = [PoolWorker(name, process) for name, process in workers.items()]
        self.moved_runs = 0
        """Runs that a second worker took because the first one died."""
        self._start_errors: dict[str, str] = {}
        self._was_ready: set[str] = set()
        self._deploy = deploy
        self._report_ping = on_ping
        self._clock = clock
        self._calls: dict[bytes, StageCall] = {}
        self._waiting: deque[StageCall] = deque()
        self._next_publish = 0.0

    @property
    def state(self) -> State:
        """`ready` if a worker is, else the first worker's state."""
        return "ready" if any(worker.state == "ready" for worker in self.workers) else self.workers[0].state

    @property
    def start_decided(self) -> bool:
        """True when each first worker is ready or has failed to start."""
        return len(self._was_ready | self._start_errors.keys()) == len(self.workers)

    @property
    def start_error(self) -> str:
        """Why no first worker will ever be ready; "" if one is."""
        return "" if self._was_ready else next(iter(self._start_errors.values()), "")

    def submit(self, call: StageCall) -> None:
        """Queue a call for the loop; it is always answered through its `responses`."""
        self.hub.post(partial(self._try_receive, call))

    def start(self) -> None:
        """Start all workers."""
        for worker in self.workers:
            self._start(worker)

    def _start(self, worker: PoolWorker) -> None:
        now = worker.last_activity_s = self._clock()
        try:
            sock = worker.process.start(now)
            if sock is not None:
                worker.peer = self.hub.adopt(sock)
            else:
                self._was_ready.add(worker.name)  # a stub that waits for a worker to join serves meanwhile
        except OSError as error:  # no such interpreter, no memory: retried with back-off
            log.error("worker %s could not be started: %s", worker.name, error)
            self.fail_start(f"the worker could not be started: {error}", worker)
            worker.process.died(now)

    def turn(self, timeout_s: float = TURN_S) -> None:
        """Process received items, pass waiting calls to the worker, supervise the worker."""
        for peer, item in self.hub.poll(timeout_s):
            try:
                if peer is None:
                    cast(Callable[[], None], item)()
                elif (worker := next((w for w in self.workers if w.peer is peer), None)) is not None:
                    self._on_worker(worker, peer, item)
                elif isinstance(item, msg.PingMessage) and item.state == "joining":
                    self._on_join(peer, item.text)
            except Exception:  # loop boundary: an error in one item must not lose the others
                log.exception("%s could not be handled", "a posted call" if peer is None else type(item).__name__)
        for _ in range(len(self._waiting)):
            call = self._waiting.popleft()
            if not self._try_hand_over(call):
                self._waiting.append(call)  # no room for its inputs yet; calls behind it may proceed
        for worker in self.workers:
            self._keep(worker)
        now = self._clock()
        for call in [call for call in self._calls.values() if call.reply is None]:
            call.window.elapse(now)
            while call.deferred and self._has_room(call, call.deferred[0][1]):
                self._apply(call, *call.deferred.popleft())
        if now >= self._next_publish and (call := next((c for c in self._calls.values() if not c.ended), None)):
            self._next_publish = now + PUBLISH_S
            call.responses.publish()

    # --- calls -----------------------------------------------------------------------------------------------------
    def _on_gone(self, call: StageCall) -> None:
        """The client of a direct call has cancelled or disconnected."""
        if call in self._waiting:  # not yet sent to the worker
            self._waiting.remove(call)
            self._fail(call, Cancelled("client_gone"))
        elif not call.ended and call.worker is not None and call.worker.peer is not None:
            call.drop_deferred()
            call.worker.peer.send(msg.StopMessage(call.message.run))

    def _try_receive(self, call: StageCall) -> None:
        """Call `_receive`; answer the call if it raises."""
        try:
            self._receive(call)
        except Exception as error:  # loop boundary: the caller must be answered
            if not isinstance(error, OmniError):
                log.exception("request %s could not be received", call.message.request_id)
            call.responses.end(ErrorInfo.of(error, self.stage).error())

    def _receive(self, call: StageCall) -> None:
        run = call.message.run
        if run in self._calls:
            raise BadRequest("this run is already open", "open")
        call.until_s = self._clock() + (call.message.wait_s if len(self.workers) > 1 else 0.0)
        if call.message.reply:
            if not call.message.wait_s and (refusal := self._refusal()):  # in the first response, which costs nothing
                raise refusal
            try:
                call.reply = self.hub.connect(call.message.reply)
            except PeerLost:
                log.warning("request %s: its orchestrator is gone", call.message.request_id)
                return  # no one waits for an answer, and a response to a dead orchestrator would block forever
            call.reply.send(msg.ReceivedMessage(run))  # first: from the acknowledgement on, our death must be noticed
            call.responses.acknowledge()
        else:
            call.responses.watch(self._posting(self._on_gone, call))
        self._calls[run] = call
        self._waiting.append(call)

    def _try_hand_over(self, call: StageCall) -> bool:
        """Call `_hand_over`; end the call if it raises."""
        try:
            return self._hand_over(call)
        except Exception as error:  # loop boundary: the call must be ended
            log.exception("a call could not be handed over")
            self._fail(call, Internal(describe(error)))
            return True

    def _hand_over(self, call: StageCall) -> bool:
        """Send a call to a worker; False if it must wait for one, or for room for its inputs."""
        if refusal := self._refusal():
            if self._clock() < call.until_s and any(
                w.state in ("restarting", "starting", "waiting") for w in self.workers
            ):
                return False
            self._fail(call, WorkerDied(self.stage) if call.was_moved else refusal)
            return True
        worker = self._choose(call.message)
        assert worker.peer is not None, "it can take runs"
        if call.inputs is not None and not worker.peer.put(call.inputs):
            return False
        call.worker, worker.runs = worker, worker.runs + 1
        worker.peer.send(call.message)
        return True

    def _choose(self, message: msg.OpenMessage) -> PoolWorker:
        """The worker that takes a run; at least one can."""
        able = {worker.name: worker for worker in self.workers if worker.can_take_runs}
        live = {name: worker.runs for name, worker in able.items()}
        if len(able) == 1 or self._deploy.route != "affinity":
            return able[least_live(live)]
        messages = decode_request(message.request).messages[:2]  # the system's turn and the first of the user
        return able[by_affinity(live, repr(messages).encode())]

    def _refusal(self) -> OmniError | None:
        """Why a call cannot be taken now, if it cannot."""
        if any(worker.can_take_runs for worker in self.workers):
            return None
        return Unavailable(_NOT_READY.get(self.state, "the stage is not ready"), self.stage)

    def _fail(self, call: StageCall, error: OmniError, worker_died: bool = False) -> None:
        """End a call whose run is not with a worker."""
        info = ErrorInfo.of(error, self.stage)
        self._close(call, msg.FailedMessage(call.message.run, info, worker_died=worker_died), None)

    def _close(self, call: StageCall, end: msg.FinishedMessage | msg.FailedMessage, worker: Peer | None) -> None:
        """Close the Triton response stream of a call. `worker`: has the run, and sends its end when released."""
        call.ended, call.inputs = True, None
        call.drop_deferred()
        if call.worker is not None:
            call.worker.runs -= 1
        closed = partial(self._on_closed, call, end, worker)
        orchestrator_lost = isinstance(end, msg.FailedMessage) and end.reply_lost
        if call.reply is None:
            call.responses.end(self._last(call, end), self._posting(closed))
        elif orchestrator_lost or call.reply.lost:
            call.reply = None  # no end may be sent without a FINAL
            closed()  # a response to a dead orchestrator would block forever
        else:
            # FINAL alone: through Triton an error that is not a stream's first response can get lost (decision 0001)
            call.responses.end(None, self._posting(closed))

    def _on_closed(self, call: StageCall, end: msg.FinishedMessage | msg.FailedMessage, worker: Peer | None) -> None:
        """The response stream is closed, so the end may be sent: by the worker that has the run, or else by us."""
        run = call.message.run
        self._calls.pop(run, None)
        if worker is not None:
            if worker.send(msg.ReleaseMessage(run)):
                return
            # it died after it had sent us the end, perhaps before it sent it to the orchestrator
            end = msg.FailedMessage(run, ErrorInfo.of(WorkerDied(self.stage), self.stage), worker_died=True)
        if call.reply is not None:
            call.reply.send(end)

    # --- the worker --------------------------------------------------------------------------------------------------
    def _on_worker(self, worker: PoolWorker, peer: Peer, item: object) -> None:
        worker.last_activity_s = self._clock()
        match item:
            case msg.PingMessage():
                self._on_ping(worker, item)
            case msg.AcceptedMessage(run=run):
                self._calls[run].accepted, self._calls[run].inputs = True, None
            case Chunk() | msg.FinishedMessage():
                call = self._calls[item.run]
                if call.deferred or not self._has_room(call, item):
                    call.deferred.append((peer, item))
                else:
                    self._apply(call, peer, item)
            case msg.FailedMessage(run=run):
                call = self._calls[run]
                self._close(call, item, peer if call.accepted else None)
            case Lost():
                self._on_lost(worker)
            case _:
                log.warning("unexpected message %s from the worker", type(item).__name__)

    def _on_join(self, peer: Peer, name: str) -> None:
        """A worker that was started by other means wants to serve this stage."""
        refusal = ""
        for worker in self.workers:
            refusal = worker.process.join(peer, name, self._clock())
            if not refusal:
                worker.peer, worker.last_activity_s = peer, self._clock()
                peer.send(msg.PingMessage(self.hub.name, "joined"))
                return
        log.warning("worker %s was refused: %s", name, refusal)
        peer.send(msg.PingMessage(self.hub.name, "refused", text=refusal))

    def _posting(self, act: Callable[[*Arguments], None], *arguments: *Arguments) -> Callable[[], None]:
        """A function that makes the loop's thread call `act`; may be called from any thread."""
        return partial(self.hub.post, partial(act, *arguments))

    def _has_room(self, call: StageCall, item: Chunk | msg.FinishedMessage) -> bool:
        return not isinstance(item, Chunk) or call.window.has_room(item.nbytes)

    def _apply(self, call: StageCall, worker: Peer, item: Chunk | msg.FinishedMessage) -> None:
        if isinstance(item, Chunk):
            self._respond(worker, call, item)
        else:
            self._close(call, item, worker if call.accepted else None)

    def _respond(self, worker: Peer, call: StageCall, chunk: Chunk) -> None:
        """Send one piece of a direct call's output."""
        output = chunk.edge.removeprefix(msg.OUTPUT_PREFIX)
        index = call.pieces.get(output, 0)
        call.pieces[output] = index + 1
        piece, request_id = chunk.piece, call.message.request_id
        call.window.send(chunk.nbytes, 0.0 if piece is None else piece.playback_s)
        kind = piece.kind if output and piece is not None else "chunk"
        event = Event(kind, request_id, output=output, stage=self.stage, index=index, piece=piece)
        tensors = tuple(tensor for tensor in chunk.tensors if tensor.name in self._output_tensors)
        failed = self._posting(self._on_gone, call)
        sent = self._posting(worker.release, chunk)  # by then the worker may have been restarted
        call.responses.send(Response(event, tensors), lambda error: failed(), sent)

    def _last(self, call: StageCall, end: msg.FinishedMessage | msg.FailedMessage) -> Response | OmniError:
        """The last response of a direct call."""
        if isinstance(end, msg.FailedMessage):
            return end.error.error()
        event = Event(
            "end",
            call.message.request_id,
            stage=self.stage,
            index=sum(call.pieces.values()),
            outcome="completed",
            finish_reason=end.reason,
            usage=end.usage,
        )
        return Response(event)

    def _on_ping(self, worker: PoolWorker, ping: msg.PingMessage) -> None:
        if ping.state == "failed":
            log.error("worker %s: the engine did not load: %s", worker.name, ping.text)
            self.fail_start(ping.text, worker)
        elif ping.state == "ready":
            worker.process.gpu_paths = ping.text
            if worker.process.state != "ready":
                worker.process.is_ready(self._clock())
                self._was_ready.add(worker.name)
        self._report_ping(worker, ping)

    def _on_lost(self, worker: PoolWorker) -> None:
        """A worker died: give its unaccepted runs to another one, end the others, and schedule the next start.

        An orchestrator also sees the death of accepted runs on the worker's link; the duplicate changes nothing.
        """
        worker.peer = None
        self._report_ping(worker, msg.PingMessage())  # nothing is live, and the next worker counts from zero
        self.fail_start("the engine worker died while loading", worker)
        if worker.name in self._was_ready or len(self.workers) > 1:
            worker.process.died(self._clock())
        for call in [c for c in self._calls.values() if c.worker is worker and not c.ended]:
            if len(self.workers) > 1 and not call.accepted and not call.was_moved:
                call.worker, call.was_moved, worker.runs = None, True, worker.runs - 1
                self.moved_runs += 1
                self._waiting.append(call)
            else:
                self._fail(call, WorkerDied(self.stage), worker_died=call.accepted)
        if len(self.workers) == 1:  # what waits for room would wait for a restart
            while self._waiting:
                self._fail(self._waiting.popleft(), WorkerDied(self.stage))

    def fail_start(self, reason: str, worker: PoolWorker | None = None) -> None:
        """Record that a first worker (None: every one) will never be ready. Only the first reason is kept."""
        for one in self.workers if worker is None else [worker]:
            if one.name not in self._was_ready:
                self._start_errors.setdefault(one.name, reason)

    def _keep(self, worker: PoolWorker) -> None:
        """Restart a dead worker when due; kill one that is stopped, silent for hang_s, or not ready in time."""
        now, process = self._clock(), worker.process
        if not process.is_stopped():
            worker.stopped_since_s = None
        elif worker.stopped_since_s is None:
            worker.stopped_since_s = now
        elif now - worker.stopped_since_s > STOPPED_S:
            log.error("the process of worker %s was stopped for %g s", worker.name, STOPPED_S)
            process.kill()
        ready = process.state == "ready"
        bound = self._deploy.hang_s if ready else self._deploy.start_timeout_s
        if process.due(now):
            self._start(worker)
        elif worker.peer is not None and now - worker.last_activity_s > bound > 0:
            what = "was silent for" if ready else "was not ready within"
            log.error("worker %s %s %g s", worker.name, what, bound)
            self.fail_start(f"the engine {what} {bound:g} s", worker)
            process.kill()  # its link closes, which is handled like any other death
            worker.last_activity_s = now
