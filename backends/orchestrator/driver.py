# SPDX-License-Identifier: Apache-2.0
"""Does what the request machine decides: one loop, one dict of live requests, no Triton.

Everything arrives at `turn`: requests from Triton's threads and answers of the opener are posted to the hub,
outputs and ends come over its links, time passes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from backends.config.schema import OrchestratorDeploy
from backends.control import messages as msg
from backends.control.hub import Hub, Lost, Peer
from backends.control.records import State
from backends.core import logs
from backends.core import request as life
from backends.core.chunk import Chunk
from backends.core.errors import BadRequest, DeadlineExceeded, Internal, OmniError, StageFailed, TooBusy, Unavailable
from backends.core.generate import encode_request
from backends.core.ids import new_run_id
from backends.core.pipeline import Pipeline
from backends.core.traces import traces
from backends.orchestrator.admission import Admission
from backends.orchestrator.check import check_request, check_request_id
from backends.orchestrator.live import Arrival, Collected, Limits, Live
from backends.orchestrator.metrics import CLIENT, Metrics
from backends.orchestrator.ports import Front, OpenCall, Opener, Piece
from backends.orchestrator.traces import write
from backends.wire import WIRE_VERSION, Event

log = logging.getLogger("triton_omni.orchestrator")

SHOWN_REQUESTS = 100
TICK_S = 0.1  # resolution of deadlines
ABORT, CLIENT_GONE = "abort", "client_gone"  # why a request was cancelled
STOP_GRACE_S = 10.0  # a stopped run that has not answered by then is given up; its worker is hung or gone


# --- posted by other threads ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Gone:
    """The client of a run went away."""

    run: bytes


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A call that is no request."""

    front: Front
    error: OmniError


@dataclass(frozen=True, slots=True)
class AnswerFailed:
    """A run's response could not be sent."""

    run: bytes
    error: OmniError


@dataclass(frozen=True, slots=True)
class _Opened:
    run: bytes
    stage: str
    handle: Any


@dataclass(frozen=True, slots=True)
class _OpenFailed:
    run: bytes
    stage: str
    error: OmniError


@dataclass(frozen=True, slots=True)
class _Sent:
    run: bytes
    peer: Peer
    chunk: Chunk
    nbytes: int


class Orchestrator:
    """Runs the requests of one pipeline. All state about a request is its Live."""

    def __init__(
        self,
        pipeline: Pipeline,
        deploy: OrchestratorDeploy,
        hub: Hub,
        opener: Opener,
        stage_states: Callable[[], dict[str, dict[str, Any]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pipeline = pipeline
        self.deploy = deploy
        self.hub = hub
        self.metrics = Metrics(pipeline)
        self.traces = traces(pipeline.name)
        self.lives: dict[bytes, Live] = {}
        self.admission: Admission[Live] = Admission(deploy.max_live, deploy.max_queue)
        self._opener = opener
        self._stage_states = stage_states
        self._clock = clock
        self._next_tick = 0.0
        self._inbox: deque[tuple[Peer | None, Any]] = deque()

    # --- from any thread -----------------------------------------------------------------------------------------
    def submit(self, arrival: Arrival) -> None:
        """Take a request; it is answered through its front, whatever happens."""
        self.hub.post(arrival)

    def refuse(self, front: Front, error: OmniError) -> None:
        """Answer a call that could not be read as a request."""
        self.hub.post(Unreadable(front, error))

    def client_gone(self, run: bytes) -> None:
        """Say that a run's client went away."""
        self.hub.post(Gone(run))

    def answer_failed(self, run: bytes, error: OmniError) -> None:
        """Say that a response of a run could not be sent."""
        self.hub.post(AnswerFailed(run, error))

    @property
    def state(self) -> State:
        return "stuck" if self._opener.stuck else "ready"

    # --- the loop ------------------------------------------------------------------------------------------------
    def turn(self, timeout_s: float = TICK_S) -> None:
        """One turn: take what came in, start what may start, look at the clock."""
        self._inbox.extend(self.hub.poll(0.0 if self._inbox else timeout_s))
        with self.hub.joined():
            while self._inbox:  # kept over a turn that an exception ends: one item's trouble must not lose the others
                peer, item = self._inbox.popleft()
                if peer is None:
                    self._on_posted(item)
                else:
                    self._on_item(peer, item)
            self._admit()
            now = self._clock()
            if now >= self._next_tick:
                self._next_tick = now + TICK_S
                self._check_deadlines(now)

    def _admit(self) -> None:
        for live in self.admission.admit():
            live.admitted_s = live.heard_s = self._clock()
            self.metrics.queue_s.at().observe(live.admitted_s - live.arrived_s)
            self._apply(live, life.Started())

    def _on_posted(self, item: object) -> None:
        match item:
            case Arrival():
                self._on_arrival(item)
            case Gone(run):
                self._apply_to(run, life.Cancelled(CLIENT_GONE))
            case Unreadable(front, error):
                self._refuse(front, error)
            case AnswerFailed(run, error):
                self._apply_to(run, life.Expired(error))
            case _Opened(run, stage, handle):
                self._on_opened(run, stage, handle)
            case _OpenFailed(run, stage, error):
                self._on_open_failed(run, stage, error)
            case _Sent(run, peer, chunk, nbytes):
                peer.release(chunk)
                if run in self.lives:
                    self.lives[run].waiting -= nbytes
            case _:
                raise TypeError(item)

    def _on_item(self, peer: Peer, item: object) -> None:
        stage = peer.name.partition("/")[2]
        match item:
            case Chunk():
                self._on_chunk(peer, item)
            case msg.Received(run=run):
                if run in self.lives:  # the stub speaks for the run until its worker does, whichever comes first here
                    self.lives[run].peers.setdefault(stage, peer)
            case msg.Accepted(run=run, address=address):
                self._on_accepted(peer, run, stage, address)
            case msg.Progress(run=run, meta=meta):
                self._on_progress(run, stage, meta)
            case msg.Finished(run=run, reason=reason, usage=usage, stats=stats):
                self._note(run, stage, stats)
                self._apply_to(run, life.Finished(stage, reason, usage))
            case msg.Failed(run=run, error=error, stats=stats):
                self._note(run, stage, stats)
                self._apply_to(run, life.Failed(stage, error.error()))
            case msg.Ping():
                peer.send(msg.Ping(self.hub.name, self.state, len(self.lives)))
            case Lost():
                self._on_lost(peer, stage)
            case _:
                log.warning("unexpected message %s from %s", type(item).__name__, peer.name)

    def _note(self, run: bytes, stage: str, stats: msg.RunStats | None) -> None:
        if run in self.lives and stats is not None:
            self.lives[run].stats[stage] = stats

    def _on_accepted(self, peer: Peer, run: bytes, stage: str, address: str) -> None:
        live = self.lives.get(run)
        if live is None or stage not in live.machine.open_runs:  # given up meanwhile: it must not work for nobody
            peer.send(msg.Stop(run))
            return
        live.addresses[stage] = address
        live.accepted_s[stage] = self._clock()
        live.peers[stage] = peer
        self._apply(live, life.Accepted(stage))

    # --- arrivals ------------------------------------------------------------------------------------------------
    def _on_arrival(self, arrival: Arrival) -> None:
        try:
            check_request_id(arrival.request_id)
            if arrival.request.operation == "health":
                arrival.front.end(Piece(self.health(arrival.request_id)))
            elif arrival.request.operation == "requests":
                arrival.front.end(Piece(self._requests(arrival.request_id)))
            elif arrival.request.operation == "abort":
                arrival.front.end(Piece(self._abort(arrival)))
            else:
                self._queue(arrival)
        except OmniError as error:
            self._refuse(arrival.front, error)
        except Exception as error:  # the loop border: a bug in a pipeline's check must not leave a client waiting
            request_id = arrival.request_id
            log.exception("request %s could not be checked", request_id, extra={"request_id": request_id})
            self._refuse(arrival.front, Internal(f"{type(error).__name__}: {error}"))

    def _refuse(self, front: Front, error: OmniError) -> None:
        """End a request at the door: it took no time."""
        self.metrics.ended(error.code, 0.0, {})
        front.fail(error)

    def _queue(self, arrival: Arrival) -> None:
        check_request(self.pipeline, arrival.request, arrival.media)
        machine = life.Request(
            self.pipeline, self.pipeline.wanted(arrival.request), self.pipeline.needed(arrival.request)
        )
        limits = Limits.of(arrival.request, self.deploy)
        collected = None if arrival.request.stream else Collected()
        live = Live(new_run_id(), arrival, machine, limits, self._clock(), collected=collected)
        self.admission.join(live, arrival.request.priority)
        self.lives[live.run] = live
        arrival.front.bind(live.run)

    def _abort(self, arrival: Arrival) -> Event:
        """End every request that carries the target id; answers how many there were. Idempotent."""
        target = arrival.request.target
        if not target:
            raise BadRequest("an abort needs the id of the request to end", "target")
        working = [live for live in self.lives.values() if live.machine.outcome is None]
        found = [live for live in working if live.arrival.request_id == target]
        for live in found:
            self._apply(live, life.Cancelled(ABORT))
        return Event("end", arrival.request_id, outcome="completed", finish_reason="stop", meta={"aborted": len(found)})

    def health(self, request_id: str = "") -> Event:
        """The pipeline's state: ready if runs can be opened and every stage has a ready instance."""
        stages = self._stage_states()
        for stage in self.pipeline.stages:
            bound = sum(1 for live in self.lives.values() if stage.name in live.machine.open_runs)
            stages.setdefault(stage.name, {"state": "missing", "instances": 0})["live"] = bound
        ready = self.state == "ready" and all(s["state"] == "ready" for s in stages.values())
        meta = {
            "pipeline": self.pipeline.name,
            "version": WIRE_VERSION,
            "ready": ready,
            "stages": stages,
            "live": len(self.admission.live),
            "queued": self.admission.queued,
            "operations": [o.name for o in self.pipeline.operations],
            "about": dict(self.pipeline.about),
        }
        return Event("health", request_id, meta=meta)

    def _requests(self, request_id: str) -> Event:
        """The oldest requests that are not forgotten yet, beside what `health` says."""
        now = self._clock()
        oldest = sorted(self.lives.values(), key=lambda live: live.arrived_s)[:SHOWN_REQUESTS]
        event = self.health(request_id)
        event.meta["requests"] = [live.summary(now) for live in oldest]
        return event

    # --- outputs -------------------------------------------------------------------------------------------------
    def _on_chunk(self, peer: Peer, chunk: Chunk) -> None:
        live = self.lives.get(chunk.run)
        if live is None:
            peer.release(chunk)
            return
        live.heard_s = self._clock()
        self._apply(live, life.Arrived(chunk.edge.removeprefix(msg.OUTPUT_PREFIX), (peer, chunk)))

    def _emit(self, live: Live, output: str, index: int, item: tuple[Peer, Chunk]) -> None:
        peer, chunk = item
        self._count_piece(live, output, chunk)
        live.count(output, chunk)
        nbytes = chunk.nbytes
        live.waiting += nbytes
        if live.collected is not None:
            live.collected.add(chunk)
            peer.release(chunk)
        else:
            stage = self.pipeline.output(output).stage
            meta = {key: value for key, value in chunk.meta.items() if key != "text"}
            event = Event(output, live.arrival.request_id, output, stage, index, meta)  # pyright: ignore[reportArgumentType]
            run, post = live.run, self.hub.post
            live.arrival.front.send(
                Piece(event, chunk.meta.get("text"), chunk.tensors), lambda: post(_Sent(run, peer, chunk, nbytes))
            )
        if live.waiting > self.deploy.max_output_bytes:
            self._apply(live, life.Expired(_too_much(live, self.deploy.max_output_bytes)))

    def _count_piece(self, live: Live, output: str, chunk: Chunk) -> None:
        metrics, now_s = self.metrics, live.heard_s
        if output not in live.first_s:
            live.first_s[output] = now_s
            metrics.first_output_s.at(output).observe(now_s - live.arrived_s)
        else:
            metrics.gap_s.at(output).observe(now_s - live.last_s[output])
        live.last_s[output] = now_s
        metrics.pieces.add(1, output)
        transfer_s = now_s - chunk.sent_s if chunk.sent_s else 0.0
        metrics.received(self.pipeline.output(output).stage, CLIENT, 1, chunk.nbytes, transfer_s)
        if output == "audio" and chunk.meta.get("sample_rate"):
            piece_s = sum(tensor.spec.shape[0] for tensor in chunk.tensors) / chunk.meta["sample_rate"]
            metrics.audio_s.add(piece_s)
            live.player.hear(now_s, piece_s)

    def _on_progress(self, run: bytes, stage: str, meta: dict[str, Any]) -> None:
        live = self.lives.get(run)
        if live is None or live.machine.outcome is not None:
            return
        live.heard_s = self._clock()
        if live.collected is None:
            live.arrival.front.send(Piece(Event("progress", live.arrival.request_id, "", stage, 0, meta)), None)

    # --- what the machine decides ----------------------------------------------------------------------------------
    def _apply_to(self, run: bytes, event: life.Event) -> None:
        if run in self.lives:
            self._apply(self.lives[run], event)

    def _apply(self, live: Live, event: life.Event) -> None:
        for action in live.machine.on(event):
            match action:
                case life.Open(stage):
                    self._open(live, stage)
                case life.Emit(output, index, item):
                    self._emit(live, output, index, item)
                case life.Release((peer, chunk)):
                    peer.release(chunk)
                case life.Stop(stage):
                    live.peers[stage].send(msg.Stop(live.run))
                case life.Close(stage, lost):
                    self._close(live, stage, lost)
                case life.End():
                    self._end(live, action)
                case life.Done():
                    self._forget(live)

    def _open(self, live: Live, stage: str) -> None:
        machine, run = live.machine, live.run
        consumers = {t: live.addresses[t] for t in self.pipeline.downstream(stage, machine.needed)}
        media = [spec.name for spec in self.pipeline.stage(stage).inputs if spec.name in live.arrival.media]
        message = msg.Open(
            run,
            live.arrival.request_id,
            encode_request(live.arrival.request),
            reply=self.hub.address,
            upstream=tuple(sorted(self.pipeline.upstream(stage, machine.needed))),
            consumers=consumers,
            wanted=tuple(o for o in machine.emitted if self.pipeline.output(o).stage == stage),
            has_inputs=bool(media),
            stall_s=live.limits.stall_s,
        )
        self.metrics.opened.add(1, stage)
        call = OpenCall(self.pipeline.model(stage), msg.encode(message), live.arrival.inputs, tuple(media))
        post = self.hub.post
        self._opener.open(
            call,
            lambda handle: post(_Opened(run, stage, handle)),
            lambda error: post(_OpenFailed(run, stage, error)),
        )

    def _on_opened(self, run: bytes, stage: str, handle: Any) -> None:
        live = self.lives.get(run)
        if live is not None and stage in live.closing:
            self._put_away(handle, live.closing.pop(stage))
            self._forget(live)
        elif live is not None and stage in live.machine.open_runs:
            live.handles[stage] = handle
        else:  # given up meanwhile: whether its stream ever ends is unknown
            self._opener.bury(handle)

    def _on_open_failed(self, run: bytes, stage: str, error: OmniError) -> None:
        live = self.lives.get(run)
        if live is not None:
            self._apply(live, life.OpenFailed(stage, error))
            live.closing.pop(stage, None)  # there is no handle to wait for
            self._forget(live)

    def _close(self, live: Live, stage: str, lost: bool) -> None:
        died = lost or (stage in live.accepted_s and stage not in live.stats)  # a worker measures all that it took
        self.metrics.run_ended(stage, died, live.stats.get(stage))
        if stage in live.handles:
            self._put_away(live.handles.pop(stage), lost)
        else:
            live.closing[stage] = lost

    def _put_away(self, handle: Any, lost: bool) -> None:
        if lost:
            self._opener.bury(handle)
        else:
            self._opener.close(handle)

    def _end(self, live: Live, end: life.End) -> None:
        now, request_id, piece = self._clock(), live.arrival.request_id, None
        if end.outcome is not life.Outcome.FAILED:
            try:
                piece = live.end_piece(end, now)
            except Exception as error:  # the loop border: an answer that cannot be joined is an error, not silence
                log.exception("request %s: answer could not be joined", request_id, extra={"request_id": request_id})
                end = replace(end, outcome=life.Outcome.FAILED, error=Internal(f"{type(error).__name__}: {error}"))
        live.end, live.ended_s = end, now
        self._count_end(live, end, now)
        if piece is not None:
            live.arrival.front.end(piece)
            return
        error = end.error or Internal("failed without a reason")
        facts = logs.about(request_id, error)
        log.warning("request %s failed after %s: %s", request_id, live.usage(end), error.line(), extra=facts)
        live.arrival.front.fail(error)

    def _count_end(self, live: Live, end: life.End, now: float) -> None:
        outcome = end.error.code if end.error is not None else end.outcome.value
        self.metrics.ended(outcome, now - live.arrived_s, live.usage(end))
        if end.outcome is life.Outcome.CANCELLED and end.error is not None:
            self.metrics.cancelled.add(1, end.error.message)
        if end.outcome is life.Outcome.COMPLETED and live.player.heard_s:
            self.metrics.heard(live.player, live.arrived_s)

    def _forget(self, live: Live) -> None:
        """Drop a request that is Done and whose handles are all put away."""
        if live.machine.outcome is None or live.machine.open_runs or live.closing:
            return
        self.admission.leave(live)
        if self.lives.pop(live.run, None) is not None and self.traces is not None:
            write(self.traces, live)

    # --- losses and time -----------------------------------------------------------------------------------------
    def _on_lost(self, peer: Peer, stage: str) -> None:
        bound = [live for live in self.lives.values() if live.peers.get(stage) is peer]
        for live in bound:
            self._apply(live, life.Failed(stage, StageFailed("the stage's worker died", stage), lost=True))

    def _check_deadlines(self, now: float) -> None:
        if self._opener.stuck:
            self._fail_unopened()
        for live in list(self.lives.values()):
            if live.machine.outcome is None:
                error = live.expired(now)
                if error is not None:
                    self._apply(live, life.Expired(error))
            elif live.ended_s is not None and now - live.ended_s > STOP_GRACE_S:
                self._give_up(live)

    def _fail_unopened(self) -> None:
        """The opener does not come back: who waits for it must not wait on. Runs that are open go on."""
        for live in list(self.lives.values()):
            for stage in live.machine.open_runs:
                if stage not in live.handles and stage not in live.peers:
                    self._on_open_failed(live.run, stage, Unavailable("Triton opens no runs any more", stage))

    def _give_up(self, live: Live) -> None:
        """Close the runs of an ended request that do not answer to Stop."""
        for stage in live.machine.open_runs:
            error = DeadlineExceeded(f"did not stop within {STOP_GRACE_S:g} s", stage)
            request_id = live.arrival.request_id
            log.error("request %s: stage %s %s", request_id, stage, error.message, extra={"request_id": request_id})
            self._apply(live, life.Failed(stage, error, lost=True))
        live.closing.clear()
        self._forget(live)


def _too_much(live: Live, max_bytes: int) -> OmniError:
    """Why a request with so much output not yet taken ends."""
    if live.collected is not None:
        return BadRequest(f"the whole answer has more than {max_bytes} bytes; ask for a stream", "stream")
    return TooBusy(f"{live.waiting} bytes of output wait to be taken", "max_output_bytes")
