# SPDX-License-Identifier: Apache-2.0
"""Does what the request machine decides: one loop, one dict of live requests, no Triton.

Everything arrives at `turn`: outputs and ends come over the hub's links, time passes, and what other threads have to
say (Triton's, the opener's) is posted to the hub as a call to make here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from triton_omni.backends.config.schema import OrchestratorDeploy
from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.hub import Hub, Lost, Peer
from triton_omni.backends.control.records import State
from triton_omni.backends.core import request as life
from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    OmniError,
    StageFailed,
    Unavailable,
)
from triton_omni.backends.core.generate import encode_request
from triton_omni.backends.core.outputs import OutputPiece
from triton_omni.backends.core.pipeline import Pipeline
from triton_omni.backends.orchestrator.intake import Door
from triton_omni.backends.orchestrator.metrics import CLIENT, PipelineMetrics
from triton_omni.backends.orchestrator.ports import OpenCall, Opener, Response, ResponseSink
from triton_omni.backends.orchestrator.request_state import Arrival, RequestState, Sent, StageRun, parse_receipt
from triton_omni.backends.orchestrator.traces import write
from triton_omni.backends.telemetry import logs
from triton_omni.backends.telemetry.traces import traces
from triton_omni.backends.wire import Event, Progress, StageStatus

log = logging.getLogger("triton_omni.orchestrator")

TICK_S = 0.1  # resolution of deadlines
CLIENT_GONE = "client_gone"  # why a request was cancelled
ACCEPTED_S = 1.0  # a stream that has sent nothing for so long says that it was accepted
PUBLISH_S = 5.0  # oldest gauges while requests are open
OPEN_TRIES = 3  # of a run, where an instance refuses and another one is ready
STOP_GRACE_S = 10.0  # a stopped run that has not answered by then is given up; its worker is hung or gone


class Orchestrator:
    """Runs the requests of one pipeline. All state about a request is its Live."""

    def __init__(
        self,
        pipeline: Pipeline,
        deploy: OrchestratorDeploy,
        hub: Hub,
        opener: Opener,
        stage_states: Callable[[], dict[str, StageStatus]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pipeline = pipeline
        self.deploy = deploy
        self.hub = hub
        self.metrics = PipelineMetrics(pipeline)
        self.traces = traces(pipeline.name)
        self.door = Door(pipeline, deploy, self.metrics, stage_states, lambda: self.state, self._apply, clock)
        self.lives = self.door.lives
        self._opener = opener
        self._clock = clock
        self._next_tick = 0.0
        self._next_publish = 0.0
        self._stage_states = stage_states
        self._buried: dict[tuple[bytes, str], Any] = {}
        """Handles of runs whose worker died, until the stub says that it has closed their streams."""
        self._inbox: deque[tuple[Peer | None, Any]] = deque()

    # --- from any thread -----------------------------------------------------------------------------------------
    def submit(self, arrival: Arrival) -> None:
        """Take a request; it is answered through its front, whatever happens."""
        self.hub.post(partial(self._take, arrival))

    def refuse(self, front: ResponseSink, error: OmniError) -> None:
        """Answer a call that could not be read as a request."""
        self.hub.post(partial(self.door.refuse, front, error))

    def client_gone(self, run: bytes) -> None:
        """Say that a run's client went away."""
        self.hub.post(partial(self._apply_to, run, life.RequestCancelled(CLIENT_GONE)))

    def answer_failed(self, run: bytes, error: OmniError) -> None:
        """Say that a response of a run could not be sent."""
        self.hub.post(partial(self._apply_to, run, life.RequestExpired(error)))

    @property
    def state(self) -> State:
        return "stuck" if self._opener.stuck else "ready"

    def _take(self, arrival: Arrival) -> None:
        if arrival.request.operation == "acknowledge":
            self._acknowledge(arrival)
        else:
            self.door.take(arrival)

    # --- the loop ------------------------------------------------------------------------------------------------
    def turn(self, timeout_s: float = TICK_S) -> None:
        """One turn: take what came in, start what may start, look at the clock."""
        self._inbox.extend(self.hub.poll(0.0 if self._inbox else timeout_s))
        with self.hub.joined():
            while self._inbox:  # kept over a turn that an exception ends: one item's trouble must not lose the others
                peer, item = self._inbox.popleft()
                if peer is None:
                    item()
                else:
                    self._on_item(peer, item)
            self._admit()
            now = self._clock()
            if now >= self._next_tick:
                self._next_tick = now + TICK_S
                self._check_deadlines(now)

    def _admit(self) -> None:
        for live in self.door.admission.admit():
            live.admitted_s = live.heard_s = self._clock()
            self.metrics.queue_s.at().observe(live.admitted_s - live.arrived_s)
            self._apply(live, life.RequestAdmitted())

    def _on_item(self, peer: Peer, item: object) -> None:
        stage = peer.name.partition("/")[2]
        match item:
            case Chunk():
                self._on_chunk(peer, item)
            case msg.ReceivedMessage(run=run):
                found = self._run(run, stage)
                if found is not None and found.peer is None:  # the stub speaks for the run until its worker does
                    found.peer = peer
            case msg.AcceptedMessage(run=run, address=address):
                self._on_accepted(peer, run, stage, address)
            case msg.ProgressMessage():
                self._on_progress(item, stage)
            case msg.FinishedMessage(run=run, reason=reason, usage=usage, stats=stats):
                self._on_told(run, stage, stats)
                if run in self.lives:
                    self._deliver(self.lives[run], life.RunFinished(stage, reason, usage), None)
            case msg.FailedMessage(run=run, error=error, stats=stats):
                self._on_told(run, stage, stats)
                self._apply_to(run, life.RunFailed(stage, error.error()))
            case msg.PingMessage():
                peer.send(msg.PingMessage(self.hub.name, self.state, len(self.lives)))
            case Lost():
                self._on_lost(peer, stage)
            case _:
                log.warning("unexpected message %s from %s", type(item).__name__, peer.name)

    def _run(self, run: bytes, stage: str) -> StageRun | None:
        return self.lives[run].runs.get(stage) if run in self.lives else None

    def _on_told(self, run: bytes, stage: str, stats: msg.RunStats | None) -> None:
        """Whoever tells an end has sent FINAL before: also the stream of a run that was lost can be drained now."""
        found = self._run(run, stage)
        if found is not None and stats is not None:
            found.stats = stats
        if found is not None and found.closing:
            found.closing = False
        if (run, stage) in self._buried:
            self._opener.close(self._buried.pop((run, stage)))

    def _on_accepted(self, peer: Peer, run: bytes, stage: str, address: str) -> None:
        live = self.lives.get(run)
        if live is None or stage not in live.machine.open_runs:  # given up meanwhile: it must not work for nobody
            peer.send(msg.StopMessage(run))
            return
        accepted = live.runs[stage]
        accepted.peer, accepted.address, accepted.accepted_s = peer, address, self._clock()
        self._apply(live, life.RunAccepted(stage))

    # --- outputs -------------------------------------------------------------------------------------------------
    def _on_chunk(self, peer: Peer, chunk: Chunk) -> None:
        live = self.lives.get(chunk.run)
        if live is None:
            peer.release(chunk)
            return
        live.heard_s = self._clock()
        output = chunk.edge.removeprefix(msg.OUTPUT_PREFIX)
        if chunk.piece is None or chunk.piece.kind != output:
            peer.release(chunk)
            log.error("request %s: a chunk of output %s is no piece of it", live.arrival.request_id, output)
            return
        self._deliver(live, life.OutputArrived(output, (peer, chunk)), chunk.nbytes)

    def _deliver(self, live: RequestState, event: life.RequestEvent, nbytes: int | None) -> None:
        """Apply an output or a run's end, in order, once the client has read enough of what was sent before.

        An output that waits holds its credit, so that the stage pauses.
        """
        if live.deferred or (nbytes is not None and not live.has_room(nbytes)):
            live.blocked_s = self._clock() if live.blocked_s is None else live.blocked_s
            live.deferred.append((event, nbytes))
        else:
            self._apply(live, event)

    def _resume(self, live: RequestState) -> None:
        """Apply what waits for the client and may go on now."""
        while live.deferred and live.has_room(live.deferred[0][1] or 0):
            live.heard_s = self._clock()
            self._apply(live, live.deferred.popleft()[0])
        if not live.deferred:
            live.blocked_s = None

    def _acknowledge(self, arrival: Arrival) -> None:
        """A client has read the response with this token. Also answered if its request has ended meanwhile."""
        try:
            run, read_bytes = parse_receipt(arrival.request.target)
        except BadRequest as error:
            self.refuse(arrival.front, error)
            return
        live = self.lives.get(run)
        if live is not None and live.window is not None and live.window.acknowledge(read_bytes):
            live.blocked_s = None if live.blocked_s is None else self._clock()
            self._resume(live)
        arrival.front.end(Response(Event("end", arrival.request_id, outcome="completed", finish_reason="stop")))

    def _emit(self, live: RequestState, output: str, index: int, item: tuple[Peer, Chunk]) -> None:
        peer, chunk = item
        piece, nbytes = chunk.piece, chunk.nbytes
        assert piece is not None, "the machine emits pieces"
        self._count_piece(live, output, chunk, piece, nbytes)
        live.count(piece)
        if live.collected is not None:
            live.collected.add(piece, chunk.tensors)
            peer.release(chunk)
            if live.collected.nbytes > self.deploy.max_answer_bytes:
                most = f"the whole answer must be at most {self.deploy.max_answer_bytes} bytes; ask for a stream"
                self._apply(live, life.RequestExpired(BadRequest(most, "stream")))
            return
        stage = self.pipeline.output(output).stage
        receipt = live.mark_sent(nbytes, piece.playback_s)
        request_id, token = live.arrival.request_id, live.take_token()
        event = Event(piece.kind, request_id, output, stage, index, piece, acknowledge=receipt, token=token)
        sent = partial(self.hub.post, partial(peer.release, chunk))
        live.arrival.front.send(Response(event, chunk.tensors), sent)

    def _count_piece(self, live: RequestState, output: str, chunk: Chunk, piece: OutputPiece, nbytes: int) -> None:
        metrics, now_s = self.metrics, live.heard_s
        sent = live.sent.get(output)
        if sent is None:
            sent = live.sent[output] = Sent(now_s, now_s)
            metrics.first_output_s.at(output).observe(now_s - live.arrived_s)
        else:
            metrics.gap_s.at(output).observe(now_s - sent.last_s)
        sent.last_s = now_s
        sent.transfer.chunks += 1
        sent.transfer.nbytes += nbytes
        if chunk.sent_s:
            sent.transfer.transfer_s += now_s - chunk.sent_s
        metrics.pieces.add(1, output)
        if piece.playback_s:
            metrics.audio_s.add(piece.playback_s)
            live.player.hear(now_s, piece.playback_s)

    def _on_progress(self, message: msg.ProgressMessage, stage: str) -> None:
        live = self.lives.get(message.run)
        if live is None or live.machine.outcome is not None:
            return
        live.heard_s = self._clock()
        if live.has_room(0) and live.collected is None:
            progress = Progress(message.done, message.total)
            request_id, receipt, token = live.arrival.request_id, live.mark_sent(), live.take_token()
            event = Event("progress", request_id, stage=stage, progress=progress, acknowledge=receipt, token=token)
            live.arrival.front.send(Response(event), None)

    # --- what the machine decides ----------------------------------------------------------------------------------
    def _apply_to(self, run: bytes, event: life.RequestEvent) -> None:
        if run in self.lives:
            self._apply(self.lives[run], event)

    def _apply(self, live: RequestState, event: life.RequestEvent) -> None:
        for action in live.machine.on(event):
            match action:
                case life.OpenRun(stage):
                    self._open(live, stage)
                case life.EmitOutput(output, index, item):
                    self._emit(live, output, index, item)
                case life.ReleaseOutput((peer, chunk)):
                    peer.release(chunk)
                case life.StopRun(stage):
                    peer = live.runs[stage].peer
                    assert peer is not None, "a run is stopped when a worker has it"
                    peer.send(msg.StopMessage(live.run))
                case life.DropConsumer(stage, consumer):
                    peer = live.runs[stage].peer
                    assert peer is not None, "a run that goes on is in a worker"
                    peer.send(msg.StopMessage(live.run, consumer))
                case life.CloseRun(stage, lost):
                    self._close(live, stage, lost)
                case life.EndRequest():
                    self._end(live, action)
                case life.ForgetRequest():
                    self._forget(live)
        if live.deferred and live.machine.outcome is not None:
            self._resume(live)  # the machine releases outputs and closes runs that have ended meanwhile

    def _open(self, live: RequestState, stage: str) -> None:
        machine, run = live.machine, live.run
        fed = self.pipeline.downstream(stage, machine.needed - machine.unneeded)
        consumers = {target: live.runs[target].address for target in fed}
        media = [spec.name for spec in self.pipeline.stage(stage).inputs if spec.name in live.arrival.media]
        message = msg.OpenMessage(
            run,
            live.arrival.request_id,
            encode_request(live.arrival.request),
            reply=self.hub.address,
            upstream=tuple(sorted(self.pipeline.upstream(stage, machine.needed))),
            consumers=consumers,
            wanted=tuple(o for o in machine.emitted if self.pipeline.output(o).stage == stage),
            has_inputs=bool(media),
            stall_s=live.limits.stall_s,
            optional=tuple(target for target in fed if machine.is_optional(target)),
        )
        live.runs[stage] = StageRun()
        self.metrics.opened.add(1, stage)
        call = OpenCall(self.pipeline.model(stage), msg.encode(message), live.arrival.inputs, tuple(media))
        self._call(run, stage, call, OPEN_TRIES)

    def _call(self, run: bytes, stage: str, call: OpenCall, tries: int) -> None:
        post = self.hub.post
        self._opener.open(
            call,
            lambda handle: post(partial(self._on_opened, run, stage, handle)),
            lambda error: post(partial(self._on_refused, run, stage, call, tries - 1, error)),
        )

    def _on_refused(self, run: bytes, stage: str, call: OpenCall, tries: int, error: OmniError) -> None:
        """An instance did not take a run. Another one may: Triton gives calls to dead instances as well."""
        live = self.lives.get(run)
        is_open = live is not None and live.machine.outcome is None and live.runs[stage].closing is None
        if tries and is_open and isinstance(error, Unavailable):
            instances = self._stage_states().get(stage, StageStatus())
            if instances.ready and instances.instances > 1:
                self._call(run, stage, call, tries)
                return
        self._on_open_failed(run, stage, error)

    def _on_opened(self, run: bytes, stage: str, handle: Any) -> None:
        live = self.lives.get(run)
        opened = None if live is None else live.runs[stage]
        if live is not None and opened is not None and opened.closing is not None:
            self._put_away(run, stage, handle, opened.closing)
            opened.closing = None
            self._forget(live)
        elif live is not None and opened is not None and stage in live.machine.open_runs:
            opened.handle = handle
        else:  # given up meanwhile: whether its stream ever ends is unknown
            self._put_away(run, stage, handle, lost=True)

    def _on_open_failed(self, run: bytes, stage: str, error: OmniError) -> None:
        live = self.lives.get(run)
        if live is not None:
            self._apply(live, life.OpenFailed(stage, error))
            live.runs[stage].closing = None  # there is no handle to wait for
            self._forget(live)

    def _close(self, live: RequestState, stage: str, lost: bool) -> None:
        run = live.runs[stage]
        died = lost or (run.accepted_s is not None and run.stats is None)  # a worker measures all that it took
        self.metrics.run_ended(stage, died, run.stats)
        if run.handle is None:
            run.closing = lost
        else:
            self._put_away(live.run, stage, run.handle, lost)
            run.handle = None

    def _put_away(self, run: bytes, stage: str, handle: Any, lost: bool) -> None:
        if lost:
            self._buried[run, stage] = handle
            self._opener.bury(handle)
        else:
            self._opener.close(handle)

    def _end(self, live: RequestState, end: life.EndRequest) -> None:
        now, request_id, piece = self._clock(), live.arrival.request_id, None
        if end.outcome is not life.Outcome.FAILED:
            try:
                piece = live.end_piece(end, now)
            except Exception as error:  # the loop border: an answer that cannot be joined is an error, not silence
                log.exception("request %s: answer could not be joined", request_id, extra={"request_id": request_id})
                end = replace(end, outcome=life.Outcome.FAILED, error=Internal(f"{type(error).__name__}: {error}"))
        live.end, live.ended_s = end, now
        for output, why in end.missing.items():
            log.warning(
                "request %s: output %s is missing: %s", request_id, output, why, extra={"request_id": request_id}
            )
        self._count_end(live, end, now)
        if piece is not None:
            live.arrival.front.end(piece)
            return
        error = end.error or Internal("failed without a reason")
        facts = logs.about(request_id, error)
        log.warning("request %s failed after %s: %s", request_id, live.usage(end), error.line(), extra=facts)
        live.arrival.front.fail(error)

    def _count_end(self, live: RequestState, end: life.EndRequest, now: float) -> None:
        outcome = end.error.code if end.error is not None else end.outcome.value
        self.metrics.ended(outcome, now - live.arrived_s, live.usage(end))
        for output, sent in live.sent.items():
            self.metrics.brought(self.pipeline.output(output).stage, CLIENT, sent.transfer)
        if end.outcome is life.Outcome.CANCELLED and end.error is not None:
            self.metrics.cancelled.add(1, end.error.message)
        if end.outcome is life.Outcome.COMPLETED and live.player.heard_s:
            self.metrics.heard(live.player, live.arrived_s)

    def _forget(self, live: RequestState) -> None:
        """Drop a request that is Done and whose handles are all put away."""
        if not live.forgettable:
            return
        self.door.admission.leave(live)
        if self.lives.pop(live.run, None) is not None and self.traces is not None:
            write(self.traces, live)

    # --- losses and time -----------------------------------------------------------------------------------------
    def _on_lost(self, peer: Peer, stage: str) -> None:
        for live in [live for live in self.lives.values() if stage in live.runs and live.runs[stage].peer is peer]:
            self._apply(live, life.RunFailed(stage, StageFailed("the stage's worker died", stage), lost=True))

    def _check_deadlines(self, now: float) -> None:
        if self._opener.stuck:
            self._fail_unopened()
        if now >= self._next_publish:
            self._publish(now)
        for live in list(self.lives.values()):
            if live.machine.outcome is None:
                self._keep_up(live, now)
                error = live.expired(now)
                if error is not None:
                    live.heard_s = now
                    self._apply(live, life.RequestExpired(error, stalled=error.where == live.silent_at))
            elif live.ended_s is not None and now - live.ended_s > STOP_GRACE_S:
                self._give_up(live)

    def _keep_up(self, live: RequestState, now: float) -> None:
        """What time brings to a stream: more room for a client that does not acknowledge, and a first sign of life.

        Triton notices that a client of `/generate_stream` has left only after it has sent something.
        """
        if live.window is None or live.window.acknowledges:
            return
        live.window.elapse(now)
        self._resume(live)
        if not live.window.sent_bytes and now - live.arrived_s > ACCEPTED_S and live.machine.outcome is None:
            live.mark_sent(0)
            event = Event("accepted", live.arrival.request_id, token=live.take_token())
            live.arrival.front.send(Response(event), None)

    def _publish(self, now: float) -> None:
        """Bring the gauges up to date through an open request, whose end is sent after this.

        Without an open request Triton may be unloading this model, and then a call about metrics does not return.
        """
        live = next((live for live in self.lives.values() if live.machine.outcome is None), None)
        if live is not None:
            self._next_publish = now + PUBLISH_S
            live.arrival.front.publish()

    def _fail_unopened(self) -> None:
        """The opener does not come back: who waits for it must not wait on. Runs that are open go on."""
        for live in list(self.lives.values()):
            for stage in live.machine.open_runs:
                if live.runs[stage].handle is None and live.runs[stage].peer is None:
                    self._on_open_failed(live.run, stage, Unavailable("Triton opens no runs any more", stage))

    def _give_up(self, live: RequestState) -> None:
        """Close the runs of an ended request that do not answer to Stop."""
        for stage in live.machine.open_runs:
            error = DeadlineExceeded(f"did not stop within {STOP_GRACE_S:g} s", stage)
            request_id = live.arrival.request_id
            log.error("request %s: stage %s %s", request_id, stage, error.message, extra={"request_id": request_id})
            self._apply(live, life.RunFailed(stage, error, lost=True))
        for run in live.runs.values():
            run.closing = None
        self._forget(live)
