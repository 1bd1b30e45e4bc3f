# SPDX-License-Identifier: Apache-2.0
"""What a stage's stub does all day, without a word of Triton: hands calls to its worker, looks after it, closes calls.

An orchestrator's call is acknowledged when it is here, not when the worker takes the run: that waits for the end of
the engine's step (decision 0008). Whoever has the run tells its end, and only after Triton's FINAL: the worker from its
`Accepted` on, before that and when the worker has died this loop, over a link of its own.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

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
)
from triton_omni.backends.stub.worker_process import WorkerProcess

log = logging.getLogger("triton_omni.stage")

TURN_S = 0.25
_NOT_READY: dict[State, str] = {
    "starting": "the stage is starting",
    "restarting": "the stage is restarting",
    "gave_up": "the stage's worker died too often; it is not started again",
}


class Caller(Protocol):
    """One Triton request of this stage. Calls never block; what they send leaves in the order given."""

    def acknowledge(self) -> None:
        """Send the empty first response that an orchestrator waits for."""
        ...

    def watch(self, gone: Callable[[], None]) -> None:
        """Have `gone` called, from another thread, if the client leaves."""
        ...

    def send(self, output: str, index: int, chunk: Chunk, failed: Callable[[], None], sent: Callable[[], None]) -> None:
        """Send one piece of a direct call's output; `sent` follows in any case, both come from another thread."""
        ...

    def end(self, end: msg.FinishedMessage | msg.FailedMessage | None, pieces: int, sent: Callable[[], None]) -> None:
        """Send the last response with FINAL; None: FINAL alone. `sent` follows in any case, from another thread."""
        ...


@dataclass(eq=False, slots=True)
class Call:
    """One Triton request of this stage.

    inputs    a chunk to hand to the worker before `message`
    reply     our own link to the orchestrator; None for a direct call
    accepted  the worker has the run
    ended     Triton's side is closed, or about to be
    pieces    output → responses sent
    """

    caller: Caller
    message: msg.OpenMessage
    inputs: Chunk | None = None
    reply: Peer | None = None
    accepted: bool = False
    ended: bool = False
    pieces: dict[str, int] = field(default_factory=dict[str, int])


class StageLoop:
    """One stage instance's calls and its worker. `turn` runs in one thread; `take` may be called from any."""

    def __init__(
        self,
        stage: str,
        deploy: StageDeploy,
        worker_process: WorkerProcess,
        hub: Hub,
        note: Callable[[msg.PingMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note` gets every sign of life of the worker."""
        self.stage = stage
        self.hub = hub
        self.worker_process = worker_process
        self.settled = False
        """True when the first worker is ready, or never will be: then `refusal` says why."""
        self.refusal = ""
        self._deploy = deploy
        self._note = note
        self._clock = clock
        self._calls: dict[bytes, Call] = {}
        self._waiting: deque[Call] = deque()
        self._worker: Peer | None = None
        self._heard_s = 0.0

    def take(self, call: Call) -> None:
        """Take a call; it is answered through its caller, whatever happens."""
        self.hub.post(partial(self._try_receive, call))

    def start(self) -> None:
        """Start the worker; also when it is due again."""
        now = self._heard_s = self._clock()
        try:
            self._worker = self.hub.adopt(self.worker_process.start(now))
        except OSError as error:  # no such interpreter, no memory: tried again with back-off
            log.error("the worker could not be started: %s", error)
            self.settle(f"the worker could not be started: {error}")
            self.worker_process.died(now)

    def turn(self, timeout_s: float = TURN_S) -> None:
        """One turn: take what came in, hand over what may go, look after the worker."""
        for peer, item in self.hub.poll(timeout_s):
            try:
                if peer is None:
                    item()
                elif peer is self._worker:
                    self._on_worker(peer, item)
            except Exception:  # the loop border: one item's trouble must not lose the others
                log.exception("%s could not be handled", "a posted call" if peer is None else type(item).__name__)
        for _ in range(len(self._waiting)):
            call = self._waiting.popleft()
            if not self._try_hand_over(call):
                self._waiting.append(call)  # waits for room; calls without large inputs go on meanwhile
        self._keep_worker()

    # --- calls -----------------------------------------------------------------------------------------------------
    def _on_gone(self, call: Call) -> None:
        """The client of a direct call went away."""
        if call in self._waiting:  # its worker has not heard of it
            self._waiting.remove(call)
            self._fail(call, Cancelled("client_gone"))
        elif not call.ended and self._worker is not None:
            self._worker.send(msg.StopMessage(call.message.run))

    def _try_receive(self, call: Call) -> None:
        """As `_receive`; a call that cannot be taken at all is answered."""
        try:
            self._receive(call)
        except Exception as error:  # the loop border: whatever it was, the caller must hear of it
            log.exception("request %s could not be taken", call.message.request_id)
            call.caller.end(msg.FailedMessage(call.message.run, ErrorInfo.of(error, self.stage)), 0, lambda: None)

    def _receive(self, call: Call) -> None:
        run = call.message.run
        if run in self._calls:
            raise BadRequest("this run is open already", "open")
        if call.message.reply:
            try:
                call.reply = self.hub.connect(call.message.reply)
            except PeerLost:
                log.warning("request %s: its orchestrator is gone", call.message.request_id)
                return  # nobody waits for an answer, and a send to a dead orchestrator would wait for ever
            call.reply.send(msg.ReceivedMessage(run))  # before the acknowledgement: from then on our death must be seen
            call.caller.acknowledge()
        else:
            call.caller.watch(self._posting(self._on_gone, call))
        self._calls[run] = call
        self._waiting.append(call)

    def _try_hand_over(self, call: Call) -> bool:
        """As `_hand_over`; a call that cannot be handed over at all is ended."""
        try:
            return self._hand_over(call)
        except Exception as error:  # the loop border: whatever it was, the call must hear of it
            log.exception("a call could not be handed over")
            self._fail(call, Internal(f"{type(error).__name__}: {error}"))
            return True

    def _hand_over(self, call: Call) -> bool:
        """Give a call to the worker; False if there is no room for its inputs now."""
        worker = self._worker
        if worker is None or self.worker_process.state != "ready":
            self._fail(
                call, Unavailable(_NOT_READY.get(self.worker_process.state, "the stage is not ready"), self.stage)
            )
            return True
        if call.inputs is not None and not worker.put(call.inputs):
            return False
        call.inputs = None
        worker.send(call.message)
        return True

    def _fail(self, call: Call, error: OmniError) -> None:
        """End a call whose run no worker has."""
        self._close(call, msg.FailedMessage(call.message.run, ErrorInfo.of(error, self.stage)), None)

    def _close(self, call: Call, end: msg.FinishedMessage | msg.FailedMessage, worker: Peer | None) -> None:
        """Close Triton's side of a call. `worker`: it has the run and tells the end when we release it."""
        call.ended = True
        closed = partial(self._on_closed, call, end, worker)
        orchestrator_lost = isinstance(end, msg.FailedMessage) and end.reply_lost
        if call.reply is None:
            call.caller.end(end, sum(call.pieces.values()), self._posting(closed))
        elif orchestrator_lost or call.reply.lost:
            call.reply = None  # nobody may hear of an end whose FINAL was not sent
            closed()  # a send to a dead orchestrator would wait for ever
        else:
            # FINAL alone: through Triton an error that is not a stream's first response can get lost (decision 0001)
            call.caller.end(None, 0, self._posting(closed))

    def _on_closed(self, call: Call, end: msg.FinishedMessage | msg.FailedMessage, worker: Peer | None) -> None:
        """Triton's side of a call is closed, so its end may be told: by the worker that has the run, or else by us."""
        run = call.message.run
        self._calls.pop(run, None)
        if worker is not None:
            if worker.send(msg.ReleaseMessage(run)):
                return
            # it died after its last word to us, maybe before its last to the orchestrator
            end = msg.FailedMessage(run, ErrorInfo.of(self._death(), self.stage))
        if call.reply is not None:
            call.reply.send(end)

    # --- the worker --------------------------------------------------------------------------------------------------
    def _on_worker(self, worker: Peer, item: object) -> None:
        self._heard_s = self._clock()
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

    def _posting(self, act: Callable[..., None], *arguments: Any) -> Callable[[], None]:
        """What another thread may call to have `act` called in the loop's."""
        return partial(self.hub.post, partial(act, *arguments))

    def _respond(self, worker: Peer, call: Call, chunk: Chunk) -> None:
        """One piece of a direct call's output."""
        output = chunk.edge.removeprefix(msg.OUTPUT_PREFIX)
        index = call.pieces.get(output, 0)
        call.pieces[output] = index + 1
        sent = self._posting(worker.release, chunk)  # the worker may be another one by then
        call.caller.send(output, index, chunk, self._posting(self._on_gone, call), sent)

    def _on_ping(self, ping: msg.PingMessage) -> None:
        if ping.state == "failed":
            self.settle(ping.text)
        elif ping.state == "ready" and self.worker_process.state != "ready":
            self.worker_process.is_ready(self._clock())
            self.settled = True
        self._note(ping)

    def _on_lost(self) -> None:
        """The worker died: end its calls at once and plan the next start.

        An orchestrator learns of accepted runs from the worker's own link as well; the second word changes nothing.
        """
        self._worker = None
        self._waiting.clear()
        self._note(msg.PingMessage())  # nothing is live, and the next worker counts from zero
        for call in [c for c in self._calls.values() if not c.ended]:
            self._fail(call, self._death())
        self.settle("the engine worker died while loading")
        if not self.refusal:
            self.worker_process.died(self._clock())

    def _death(self) -> OmniError:
        return StageFailed("the stage's worker died", self.stage)

    def settle(self, refusal: str) -> None:
        """Record that the first worker will never be ready. Only the first reason is kept."""
        if not self.settled:
            self.refusal = refusal
            self.settled = True

    def _keep_worker(self) -> None:
        """Start a dead worker when it is due; end one that gives no sign of life, or does not become ready."""
        now = self._clock()
        ready = self.worker_process.state == "ready"
        bound = self._deploy.hang_s if ready else self._deploy.start_timeout_s
        if self.worker_process.due(now):
            self.start()
        elif self._worker is not None and now - self._heard_s > bound > 0:
            silent = "gave no sign of life for" if ready else "was not ready within"
            log.error("the engine %s %g s", silent, bound)
            self.settle(f"the engine {silent} {bound:g} s")
            self.worker_process.kill()  # its link closes, which is handled like any other death
            self._heard_s = now
