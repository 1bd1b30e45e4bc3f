# SPDX-License-Identifier: Apache-2.0
"""The event loop of a stage's stub, independent of Triton: passes calls to the worker, supervises it, ends calls.

An orchestrator's call is acknowledged on receipt, not when the worker accepts the run, which waits for the end of an
engine step (decision 0008). The end of a run is sent to the orchestrator only after Triton's FINAL: by the worker once
it has sent AcceptedMessage; by this loop, over its own link, before that and if the worker died.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
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
    StageFailed,
    Unavailable,
    describe,
)
from triton_omni.backends.core.pipeline import Stage
from triton_omni.backends.core.responses import Event, Response, ResponseStream
from triton_omni.backends.stub.worker_process import WorkerProcess

Arguments = TypeVarTuple("Arguments")
log = logging.getLogger("triton_omni.stage")

TURN_S = 0.25
PUBLISH_S = 5.0  # oldest gauges while calls are open
STOPPED_S = 10.0  # a stopped worker is killed after this
_NOT_READY: dict[State, str] = {
    "starting": "the stage is starting",
    "restarting": "the stage is restarting",
    "gave_up": "the stage's worker died too often and is not restarted",
    "stuck": "the stage's worker is stopped",
}


@dataclass(eq=False, slots=True)
class StageCall:
    """One Triton request of this stage.

    inputs    a chunk to send to the worker before `message`
    reply     the stub's link to the orchestrator; None for a direct call
    accepted  the worker has accepted the run
    ended     the Triton response stream is closed or being closed
    pieces    output → number of responses sent
    """

    responses: ResponseStream
    message: msg.OpenMessage
    inputs: Chunk | None = None
    reply: Peer | None = None
    accepted: bool = False
    ended: bool = False
    pieces: dict[str, int] = field(default_factory=dict[str, int])


class StageLoop:
    """Calls and worker of one stage instance. `turn` runs in one thread; `submit` may be called from any."""

    def __init__(
        self,
        *,
        stage: Stage,
        deploy: StageDeploy,
        worker_process: WorkerProcess,
        hub: Hub,
        on_ping: Callable[[msg.PingMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_ping` is called with each PingMessage of the worker."""
        self.stage = stage.name
        self._output_tensors = {spec.name for spec in stage.outputs}
        self.hub = hub
        self.worker_process = worker_process
        self.start_decided = False
        """True when the first worker is ready or has failed to start; `start_error` is the reason of a failure."""
        self.start_error = ""
        self._deploy = deploy
        self._report_ping = on_ping
        self._clock = clock
        self._calls: dict[bytes, StageCall] = {}
        self._waiting: deque[StageCall] = deque()
        self._worker: Peer | None = None
        self._last_activity_s = 0.0
        self._stopped_since_s: float | None = None
        self._next_publish = 0.0

    @property
    def state(self) -> State:
        """The worker's state; `stuck` while its process is stopped."""
        return self.worker_process.state if self._stopped_since_s is None else "stuck"

    def submit(self, call: StageCall) -> None:
        """Queue a call for the loop; it is always answered through its `responses`."""
        self.hub.post(partial(self._try_receive, call))

    def start(self) -> None:
        """Start or restart the worker."""
        now = self._last_activity_s = self._clock()
        try:
            self._worker = self.hub.adopt(self.worker_process.start(now))
        except OSError as error:  # no such interpreter, no memory: retried with back-off
            log.error("the worker could not be started: %s", error)
            self.fail_start(f"the worker could not be started: {error}")
            self.worker_process.died(now)

    def turn(self, timeout_s: float = TURN_S) -> None:
        """Process received items, pass waiting calls to the worker, supervise the worker."""
        for peer, item in self.hub.poll(timeout_s):
            try:
                if peer is None:
                    cast(Callable[[], None], item)()
                elif peer is self._worker:
                    self._on_worker(peer, item)
            except Exception:  # loop boundary: an error in one item must not lose the others
                log.exception("%s could not be handled", "a posted call" if peer is None else type(item).__name__)
        for _ in range(len(self._waiting)):
            call = self._waiting.popleft()
            if not self._try_hand_over(call):
                self._waiting.append(call)  # no room for its inputs yet; calls behind it may proceed
        self._keep_worker()
        now = self._clock()
        if now >= self._next_publish and (call := next((c for c in self._calls.values() if not c.ended), None)):
            self._next_publish = now + PUBLISH_S
            call.responses.publish()

    # --- calls -----------------------------------------------------------------------------------------------------
    def _on_gone(self, call: StageCall) -> None:
        """The client of a direct call has cancelled or disconnected."""
        if call in self._waiting:  # not yet sent to the worker
            self._waiting.remove(call)
            self._fail(call, Cancelled("client_gone"))
        elif not call.ended and self._worker is not None:
            self._worker.send(msg.StopMessage(call.message.run))

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
        if call.message.reply:
            if refusal := self._refusal():  # before the acknowledgement: the orchestrator may try another instance
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
        """Send a call to the worker; False if there is no room for its inputs yet."""
        worker = self._worker
        refusal = self._refusal()
        if worker is None or refusal is not None:
            self._fail(call, refusal or self._death())
            return True
        if call.inputs is not None and not worker.put(call.inputs):
            return False
        call.inputs = None
        worker.send(call.message)
        return True

    def _refusal(self) -> OmniError | None:
        """Why a call cannot be taken now, if it cannot."""
        if self._worker is not None and self.state == "ready":
            return None
        return Unavailable(_NOT_READY.get(self.state, "the stage is not ready"), self.stage)

    def _fail(self, call: StageCall, error: OmniError, worker_died: bool = False) -> None:
        """End a call whose run is not with a worker."""
        info = ErrorInfo.of(error, self.stage)
        self._close(call, msg.FailedMessage(call.message.run, info, worker_died=worker_died), None)

    def _close(self, call: StageCall, end: msg.FinishedMessage | msg.FailedMessage, worker: Peer | None) -> None:
        """Close the Triton response stream of a call. `worker`: has the run, and sends its end when released."""
        call.ended = True
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
            end = msg.FailedMessage(run, ErrorInfo.of(self._death(), self.stage), worker_died=True)
        if call.reply is not None:
            call.reply.send(end)

    # --- the worker --------------------------------------------------------------------------------------------------
    def _on_worker(self, worker: Peer, item: object) -> None:
        self._last_activity_s = self._clock()
        match item:
            case msg.PingMessage():
                self._on_ping(item)
            case msg.AcceptedMessage(run=run):
                self._calls[run].accepted = True
            case Chunk():
                self._respond(worker, self._calls[item.run], item)
            case msg.FinishedMessage(run=run) | msg.FailedMessage(run=run):
                call = self._calls[run]
                self._close(call, item, worker if call.accepted else None)
            case Lost():
                self._on_lost()
            case _:
                log.warning("unexpected message %s from the worker", type(item).__name__)

    def _posting(self, act: Callable[[*Arguments], None], *arguments: *Arguments) -> Callable[[], None]:
        """A function that makes the loop's thread call `act`; may be called from any thread."""
        return partial(self.hub.post, partial(act, *arguments))

    def _respond(self, worker: Peer, call: StageCall, chunk: Chunk) -> None:
        """Send one piece of a direct call's output."""
        output = chunk.edge.removeprefix(msg.OUTPUT_PREFIX)
        index = call.pieces.get(output, 0)
        call.pieces[output] = index + 1
        piece, request_id = chunk.piece, call.message.request_id
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

    def _on_ping(self, ping: msg.PingMessage) -> None:
        if ping.state == "failed":
            self.fail_start(ping.text)
        elif ping.state == "ready":
            self.worker_process.gpu_paths = ping.text
            if self.worker_process.state != "ready":
                self.worker_process.is_ready(self._clock())
                self.start_decided = True
        self._report_ping(ping)

    def _on_lost(self) -> None:
        """The worker died: end its calls at once and schedule the next start.

        An orchestrator also sees the death of accepted runs on the worker's link; the duplicate changes nothing.
        """
        self._worker = None
        self._waiting.clear()
        self._report_ping(msg.PingMessage())  # nothing is live, and the next worker counts from zero
        for call in [c for c in self._calls.values() if not c.ended]:
            self._fail(call, self._death(), worker_died=call.accepted)
        self.fail_start("the engine worker died while loading")
        if not self.start_error:
            self.worker_process.died(self._clock())

    def _death(self) -> OmniError:
        return StageFailed("the stage's worker died", self.stage)

    def fail_start(self, reason: str) -> None:
        """Record that the first worker will never be ready. Only the first reason is kept."""
        if not self.start_decided:
            self.start_error = reason
            self.start_decided = True

    def _keep_worker(self) -> None:
        """Restart a dead worker when due; kill one that is stopped, silent for hang_s, or not ready in time."""
        now = self._clock()
        if not self.worker_process.is_stopped():
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = now
        elif now - self._stopped_since_s > STOPPED_S:
            log.error("the engine's process was stopped for %g s", STOPPED_S)
            self.worker_process.kill()
        ready = self.worker_process.state == "ready"
        bound = self._deploy.hang_s if ready else self._deploy.start_timeout_s
        if self.worker_process.due(now):
            self.start()
        elif self._worker is not None and now - self._last_activity_s > bound > 0:
            what = "was silent for" if ready else "was not ready within"
            log.error("the engine %s %g s", what, bound)
            self.fail_start(f"the engine {what} {bound:g} s")
            self.worker_process.kill()  # its link closes, which is handled like any other death
            self._last_activity_s = now
