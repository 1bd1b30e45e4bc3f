# SPDX-License-Identifier: Apache-2.0
"""Receives requests and applies what their machines decide: one loop, one dict of requests, no Triton.

Everything arrives in `turn`: outputs and ends come over the hub's links, and other threads (Triton's, the opener's)
post calls to the hub.
"""

from __future__ import annotations

import hmac
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import msgspec

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
    NotFound,
    OmniError,
    StageFailed,
    Unavailable,
    WorkerDied,
    describe,
)
from triton_omni.backends.core.generate import encode_request
from triton_omni.backends.core.ids import OPERATOR_KEY, new_run_id
from triton_omni.backends.core.output_window import JSON_EXPANSION, OutputWindow
from triton_omni.backends.core.outputs import OutputPiece
from triton_omni.backends.core.pipeline import CLIENT_EDGE, Pipeline
from triton_omni.backends.core.responses import Event, Progress, Response, ResponseStream, StageStatus
from triton_omni.backends.orchestrator.admission import Admission
from triton_omni.backends.orchestrator.check import check_request, check_request_id
from triton_omni.backends.orchestrator.input_feed import InputFeed
from triton_omni.backends.orchestrator.metrics import CLIENT, PipelineMetrics
from triton_omni.backends.orchestrator.ports import OpenCall, Opener
from triton_omni.backends.orchestrator.request_state import (
    Arrival,
    Collected,
    HandleState,
    RequestDeadlines,
    RequestState,
    Sent,
    StageRun,
    parse_receipt,
)
from triton_omni.backends.orchestrator.status import EndedRequests, pipeline_status, with_requests
from triton_omni.backends.orchestrator.traces import write
from triton_omni.backends.telemetry import logs
from triton_omni.backends.telemetry.traces import traces

log = logging.getLogger("triton_omni.orchestrator")

TICK_S = 0.1  # resolution of deadlines
ABORT, CLIENT_GONE = "abort", "client_gone"  # why a request was cancelled
PUBLISH_S = 5.0  # oldest gauges while requests are open
OPEN_TRIES = 3  # of a run, where an instance refuses and another one is ready
ACCEPTED_S = 1.0  # a stream without any response says after this time that it was accepted
STOP_GRACE_S = 10.0  # a stopped run that has not ended by then is given up: its worker hangs or is gone


class Orchestrator:
    """Runs the requests of one pipeline. All state of a request is its RequestState."""

    def __init__(
        self,
        *,
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
        self.requests: dict[bytes, RequestState] = {}
        self._ended = EndedRequests()
        self.admission: Admission[RequestState] = Admission(deploy.max_live, deploy.max_queue)
        self._opener = opener
        self._stage_states = stage_states
        self._clock = clock
        self._next_tick = 0.0
        self._next_publish = 0.0
        self._next_look = 0.0
        self._states: dict[str, StageStatus] = {}
        self._abandoned: dict[tuple[bytes, str], object] = {}
        """Handles of runs whose worker died, until the stub reports that it has closed their streams."""
        self._inbox: deque[tuple[Peer | None, object]] = deque()
        self._feeding: dict[RequestState, None] = {}
        """Requests with streamed input that waits for its stage."""

    # --- from any thread -----------------------------------------------------------------------------------------
    def submit(self, arrival: Arrival) -> None:
        """Take a request; it is always answered through its `responses`."""
        self.hub.post(partial(self._receive, arrival))

    def refuse(self, responses: ResponseStream, error: OmniError) -> None:
        """Answer a call that could not be read as a request."""
        self.hub.post(partial(self._refuse, responses, error))

    @property
    def state(self) -> State:
        return "stuck" if self._opener.stuck else "ready"

    # --- the loop ------------------------------------------------------------------------------------------------
    def turn(self, timeout_s: float = TICK_S) -> None:
        """One turn: process what has arrived, start admitted requests, check deadlines."""
        self._inbox.extend(self.hub.poll(0.0 if self._inbox else timeout_s))
        with self.hub.joined():
            while self._inbox:  # kept over a turn that an exception ends, so that no other item is lost
                peer, item = self._inbox.popleft()
                if peer is None:
                    cast(Callable[[], None], item)()
                else:
                    self._on_item(peer, item)
            self._admit()
            now = self._clock()
            for state in list(self._feeding):
                self._pump(state, now)
            if now >= self._next_tick:
                self._next_tick = now + TICK_S
                self._check_deadlines(now)

    def _admit(self) -> None:
        for state in self.admission.admit():
            state.admitted_s = state.last_activity_s = self._clock()
            self.metrics.queue_s.at().observe(state.admitted_s - state.arrived_s)
            self._apply(state, life.RequestAdmitted())

    # --- arrivals ------------------------------------------------------------------------------------------------
    def _receive(self, arrival: Arrival) -> None:
        """Answer a call about the server, or queue a request."""
        try:
            check_request_id(arrival.request_id)
            match arrival.request.operation:
                case "health" | "requests":
                    event = self._health(arrival)
                case "abort":
                    event = self._abort(arrival)
                case "acknowledge":
                    event = self._acknowledge(arrival)
                case "append":
                    event = self._append(arrival)
                case _:
                    self._queue(arrival)
                    return
            arrival.responses.end(Response(event))
        except OmniError as error:
            self._refuse(arrival.responses, error)
        except Exception as error:  # loop boundary: an error in a pipeline's check must be answered
            facts = {"request_id": arrival.request_id}
            log.exception("request %s could not be checked", arrival.request_id, extra=facts)
            self._refuse(arrival.responses, Internal(describe(error)))

    def _refuse(self, responses: ResponseStream, error: OmniError) -> None:
        self.metrics.ended(error.code, 0.0, {})
        responses.end(error)

    def _queue(self, arrival: Arrival) -> None:
        request, deploy = arrival.request, self.deploy
        sizes = {name: math.prod(tensor.spec.shape) for name, tensor in arrival.media.items()}
        plan = check_request(self.pipeline, request, sizes, deploy.engine)
        state = RequestState(
            run=new_run_id(),
            arrival=arrival,
            encoded=encode_request(request),
            machine=life.RequestMachine(self.pipeline, plan.wanted, plan.needed),
            limits=RequestDeadlines.of(request, deploy),
            arrived_s=self._clock(),
            unready=frozenset(stage for stage in plan.needed if not self._is_ready(stage)),
        )
        if request.open_input:
            self._open_feed(state)
        if request.stream:
            expansion = JSON_EXPANSION if arrival.is_short_form else 1
            state.window = OutputWindow(deploy.max_output_bytes, request.acknowledge, expansion)
        else:
            state.collected = Collected({output: [] for output in state.machine.emitted})
        self.admission.join(state, request.priority)
        self.requests[state.run] = state
        arrival.responses.watch(self._posting(state.run, life.RequestCancelled(CLIENT_GONE)))
        if state.feed is not None:  # its client needs the token to go on
            self._send_accepted(state)

    def _is_ready(self, stage: str) -> bool:
        """Whether a worker of `stage` was ready at the last look, which is at most a tick old."""
        now = self._clock()
        if now >= self._next_look:
            self._next_look, self._states = now + TICK_S, self._stage_states()
        return self._states.get(stage, StageStatus()).ready > 0

    def _open_feed(self, state: RequestState) -> None:
        """Raises BadRequest for an operation whose input comes whole."""
        request = state.arrival.request
        operation = self.pipeline.operation(request)
        if operation.feed is None:
            raise BadRequest(f"the input of operation '{operation.name}' comes whole", "open_input")
        if not request.stream:
            raise BadRequest("a request with streamed input needs a streamed answer", "stream")
        state.feed = InputFeed(state.run, operation.entry, self.deploy.max_request_bytes)
        state.feed.add(request.input, request.ends_input, state.arrived_s)
        state.encoded = encode_request(msgspec.structs.replace(request, input=""))
        self._feeding[state] = None

    def _append(self, arrival: Arrival) -> Event:
        """Add text to a request's input."""
        request = arrival.request
        if not request.token:
            raise BadRequest("an append needs the token of the request's first event", "token")
        token = request.token.encode()
        state = next((s for s in self.requests.values() if hmac.compare_digest(s.token.encode(), token)), None)
        if state is None or state.machine.outcome is not None:
            raise NotFound("the request has ended, or there never was one with this token", "token")
        if state.feed is None:
            raise BadRequest("the request's input came whole", "token")
        state.feed.add(request.input, request.ends_input, self._clock())
        self._feeding[state] = None
        return Event("end", arrival.request_id, outcome="completed", finish_reason="stop")

    def _pump(self, state: RequestState, now: float) -> None:
        """Send streamed input that waits, if its stage has room."""
        assert state.feed is not None
        run = state.runs.get(state.feed.stage)
        if state.machine.outcome is not None or state.feed.pump(run.worker if run is not None else None, now):
            del self._feeding[state]

    def _abort(self, arrival: Arrival) -> Event:
        """End every request that has the target id and token; the event has their number."""
        target, token = arrival.request.target, arrival.request.token
        if not target:
            raise BadRequest("an abort needs the id of the request to end", "target")
        if not (token or arrival.is_operator):
            raise BadRequest("an abort needs the token of the request's first event, or the operator's key", "token")
        found = [
            state
            for state in self.requests.values()
            if state.arrival.request_id == target
            and state.machine.outcome is None
            and (arrival.is_operator or hmac.compare_digest(state.token.encode(), token.encode()))
        ]
        for state in found:
            self._apply(state, life.RequestCancelled(ABORT))
        return Event("end", arrival.request_id, outcome="completed", finish_reason="stop", aborted=len(found))

    def _acknowledge(self, arrival: Arrival) -> Event:
        """A client has read the response with this token. Also answered if its request has ended meanwhile."""
        run, mark = parse_receipt(arrival.request.target)
        state = self.requests.get(run)
        if state is not None and state.window is not None and state.window.acknowledge(mark):
            state.blocked_s = None if state.blocked_s is None else self._clock()
            self._resume(state)
        return Event("end", arrival.request_id, outcome="completed", finish_reason="stop")

    def _health(self, arrival: Arrival) -> Event:
        if arrival.request.operation == "requests" and not arrival.is_operator:
            raise BadRequest(f"listing requests needs the operator's key in {OPERATOR_KEY}", OPERATOR_KEY)
        requests = list(self.requests.values())
        status = pipeline_status(self.pipeline, self._stage_states(), requests, can_open=self.state == "ready")
        if arrival.request.operation == "requests":
            status = with_requests(status, requests, self._clock())
            if target := arrival.request.target:
                status = msgspec.structs.replace(status, traces=self._ended.find(target, self._clock()))
        return Event("health", arrival.request_id, status=status)

    # --- from the stages -----------------------------------------------------------------------------------------
    def _on_item(self, peer: Peer, item: object) -> None:
        stage = peer.name.partition("/")[2]
        match item:
            case Chunk():
                self._on_chunk(peer, item)
            case msg.ReceivedMessage(run=run):
                opened = self._run(run, stage)
                if opened is not None and opened.peer is None:
                    opened.stub = peer
                    self._resume(self.requests[run])
            case msg.AcceptedMessage(run=run, address=address):
                self._on_accepted(peer, run, stage, address)
            case msg.ProgressMessage():
                self._on_progress(item, stage)
            case msg.FinishedMessage(run=run, reason=reason, usage=usage):
                self._on_run_end(item, stage)
                if run in self.requests:
                    self._deliver(self.requests[run], life.RunFinished(stage, reason, usage), None)
            case msg.FailedMessage(run=run, error=error):
                self._on_run_end(item, stage)
                self._on_failed(run, life.RunFailed(stage, error.error()))
            case msg.PingMessage():
                peer.send(msg.PingMessage(self.hub.name, self.state, len(self.requests)))
            case Lost():
                self._on_lost(peer, stage)
            case _:
                log.warning("unexpected message %s from %s", type(item).__name__, peer.name)

    def _run(self, run: bytes, stage: str) -> StageRun | None:
        return self.requests[run].runs.get(stage) if run in self.requests else None

    def _on_run_end(self, end: msg.FinishedMessage | msg.FailedMessage, stage: str) -> None:
        """An end is sent after FINAL: now also the stream of a run whose worker was lost can be drained."""
        opened = self._run(end.run, stage)
        if opened is not None:
            opened.stats = end.stats or opened.stats
            opened.worker_died = isinstance(end, msg.FailedMessage) and end.worker_died
            if opened.handle_state is HandleState.ABANDON_LATER:
                opened.handle_state = HandleState.CLOSE_LATER
        if (end.run, stage) in self._abandoned:
            self._opener.close(self._abandoned.pop((end.run, stage)))

    def _on_accepted(self, peer: Peer, run: bytes, stage: str, address: str) -> None:
        state = self.requests.get(run)
        if state is None or stage not in state.machine.open_runs:  # given up meanwhile
            peer.send(msg.StopMessage(run))
            return
        accepted = state.runs[stage]
        accepted.worker, accepted.address, accepted.accepted_s = peer, address, self._clock()
        self._apply(state, life.RunAccepted(stage))

    # --- outputs -------------------------------------------------------------------------------------------------
    def _on_chunk(self, peer: Peer, chunk: Chunk) -> None:
        state = self.requests.get(chunk.run)
        if state is None:
            peer.release(chunk)
            return
        state.last_activity_s = self._clock()
        output = chunk.edge.removeprefix(msg.OUTPUT_PREFIX)
        if chunk.piece is None or chunk.piece.kind != output:
            peer.release(chunk)
            log.error("request %s: a chunk of output %s has no piece of it", state.arrival.request_id, output)
            return
        self._deliver(state, life.OutputArrived(output, (peer, chunk)), chunk.nbytes)

    def _deliver(self, state: RequestState, event: life.RequestEvent, nbytes: int | None) -> None:
        """Apply an output or a run's end, in order, once no stage may refuse the request and the client has read enough
        of what was sent before.

        An output that waits holds its credit, so that the stage pauses.
        """
        opening = state.may_be_refused
        if state.deferred or opening or (nbytes is not None and not state.has_room(nbytes)):
            if not opening and state.blocked_s is None:
                state.blocked_s = self._clock()
            state.deferred.append((event, nbytes or 0))
        else:
            self._apply(state, event)

    def _resume(self, state: RequestState) -> None:
        """Apply what waits for the client and may go on now."""
        while state.deferred and not state.may_be_refused and state.has_room(state.deferred[0][1]):
            state.last_activity_s = self._clock()
            self._apply(state, state.deferred.popleft()[0])
        if not state.deferred:
            state.blocked_s = None

    def _emit(self, state: RequestState, output: str, index: int, item: object) -> None:
        peer, chunk = cast(tuple[Peer, Chunk], item)
        piece, nbytes = chunk.piece, chunk.nbytes
        assert piece is not None, "the machine emits pieces"
        self._count_piece(state, output, chunk, piece, nbytes)
        state.count(piece)
        if state.collected is not None:
            state.collected.add(piece, chunk.tensors)
            peer.release(chunk)
            if state.collected.nbytes > self.deploy.max_answer_bytes:
                most = f"the whole answer must be at most {self.deploy.max_answer_bytes} bytes; ask for a stream"
                self._apply(state, life.RequestExpired(BadRequest(most, "stream")))
            return
        stage = self.pipeline.output(output).stage
        receipt = state.mark_sent(nbytes, piece.playback_s)
        event = Event(
            piece.kind,
            state.arrival.request_id,
            output=output,
            stage=stage,
            index=index,
            piece=piece,
            acknowledge=receipt,
            token=state.take_token(),
        )
        self._send(state, Response(event, chunk.tensors), partial(self.hub.post, partial(peer.release, chunk)))

    def _send(self, state: RequestState, response: Response, sent: Callable[[], None] | None = None) -> None:
        def failed(error: OmniError) -> None:
            self._posting(state.run, life.RequestExpired(error))()

        state.arrival.responses.send(response, failed, sent)

    def _posting(self, run: bytes, event: life.RequestEvent) -> Callable[[], None]:
        """A function that makes the loop's thread apply an event; may be called from any thread."""
        return partial(self.hub.post, partial(self._apply_to, run, event))

    def _count_piece(self, state: RequestState, output: str, chunk: Chunk, piece: OutputPiece, nbytes: int) -> None:
        metrics, now_s = self.metrics, state.last_activity_s
        sent = state.sent.get(output)
        if sent is None:
            sent = state.sent[output] = Sent(now_s, now_s)
            metrics.first_output_s.at(output).observe(now_s - state.arrived_s)
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
            state.player.receive(now_s, piece.playback_s)

    def _on_progress(self, message: msg.ProgressMessage, stage: str) -> None:
        state = self.requests.get(message.run)
        if state is None or state.machine.outcome is not None:
            return
        state.last_activity_s = self._clock()
        if state.has_room(0) and state.collected is None:
            event = Event(
                "progress",
                state.arrival.request_id,
                stage=stage,
                progress=Progress(message.done, message.total),
                acknowledge=state.mark_sent(),
                token=state.take_token(),
            )
            self._send(state, Response(event))

    # --- what the machine decides ----------------------------------------------------------------------------------
    def _apply_to(self, run: bytes, event: life.RequestEvent) -> None:
        if run in self.requests:
            self._apply(self.requests[run], event)

    def _apply(self, state: RequestState, event: life.RequestEvent) -> None:
        for action in state.machine.on(event):
            match action:
                case life.OpenRun(stage):
                    self._open(state, stage)
                case life.EmitOutput(output, index, item):
                    self._emit(state, output, index, item)
                case life.ReleaseOutput(item):
                    peer, chunk = cast(tuple[Peer, Chunk], item)
                    peer.release(chunk)
                case life.StopRun(stage):
                    self._stop(state, stage)
                case life.ConnectConsumer(stage, consumer):
                    self._connect(state, stage, consumer)
                case life.DropConsumer(stage, consumer):
                    self._stop(state, stage, consumer)
                case life.CloseRun(stage, lost):
                    self._close(state, stage, lost)
                case life.EndRequest():
                    self._end(state, action)
                case life.ForgetRequest():
                    self._forget(state)
        if state.deferred and (state.machine.outcome is not None or isinstance(event, life.RunAccepted)):
            self._resume(state)  # the machine releases outputs and closes runs that have ended meanwhile

    def _stop(self, state: RequestState, stage: str, consumer: str = "") -> None:
        peer = state.runs[stage].peer
        assert peer is not None, "a run is stopped when a worker has it"
        peer.send(msg.StopMessage(state.run, consumer))

    def _connect(self, state: RequestState, stage: str, consumer: str) -> None:
        producer = state.runs[stage].worker
        assert producer is not None, "a run that was accepted has a worker"
        producer.send(msg.ConnectMessage(state.run, consumer, state.runs[consumer].address))

    def _open(self, state: RequestState, stage: str) -> None:
        machine, run = state.machine, state.run
        fed = self.pipeline.downstream(stage, machine.needed - machine.unneeded)
        taken = (spec.name for spec in self.pipeline.stage(stage).inputs)
        media = {name: state.arrival.media[name] for name in taken if name in state.arrival.media}
        client = (CLIENT_EDGE,) if state.feed is not None and stage == state.feed.stage else ()
        upstream = sorted(self.pipeline.upstream(stage, machine.needed))
        message = msg.OpenMessage(
            run,
            state.arrival.request_id,
            state.encoded,
            reply=self.hub.address,
            upstream=(*client, *upstream),
            consumers=tuple(sorted(fed)),
            wanted=tuple(o for o in machine.emitted if self.pipeline.output(o).stage == stage),
            has_inputs=bool(media),
            stall_s=state.limits.stall_s,
            optional=tuple(target for target in fed if machine.is_optional(target)),
            wait_s=state.limits.queue_s if self.deploy.workers.get(stage, 1) > 1 else 0.0,
        )
        state.runs[stage] = StageRun()
        self.metrics.opened.add(1, stage)
        call = OpenCall(self.pipeline.model(stage), msg.encode(message), media, is_fed=bool(upstream))
        self._call(run, stage, call, OPEN_TRIES)

    def _call(self, run: bytes, stage: str, call: OpenCall, tries: int) -> None:
        self._opener.open(
            call,
            lambda handle: self.hub.post(partial(self._on_opened, run, stage, handle)),
            lambda error: self.hub.post(partial(self._on_refused, run, stage, call, tries - 1, error)),
        )

    def _on_opened(self, run: bytes, stage: str, handle: object) -> None:
        state = self.requests.get(run)
        opened = None if state is None else state.runs[stage]
        if state is None or opened is None or opened.handle_state is HandleState.GONE:
            self._dispose(run, stage, handle, lost=True)  # given up meanwhile: its stream may never end
        elif opened.handle_state is HandleState.OPENING:
            opened.handle, opened.handle_state = handle, HandleState.OPEN
        else:
            self._dispose(run, stage, handle, lost=opened.handle_state is HandleState.ABANDON_LATER)
            opened.handle_state = HandleState.GONE
            self._forget(state)

    def _on_refused(self, run: bytes, stage: str, call: OpenCall, tries: int, error: OmniError) -> None:
        """An instance did not take a run. Another one may: Triton gives calls to dead instances as well."""
        opened = self._run(run, stage)
        is_expected = opened is not None and opened.handle_state is HandleState.OPENING
        if tries and is_expected and self.requests[run].machine.outcome is None and isinstance(error, Unavailable):
            instances = self._stage_states().get(stage, StageStatus())
            if instances.ready and instances.instances > 1:
                self._call(run, stage, call, tries)
                return
        self._on_open_failed(run, stage, error)

    def _on_open_failed(self, run: bytes, stage: str, error: OmniError) -> None:
        state = self.requests.get(run)
        if state is not None:
            state.runs[stage].handle_state = HandleState.GONE
            self._on_failed(run, life.OpenFailed(stage, error))
            self._forget(state)

    def _close(self, state: RequestState, stage: str, lost: bool) -> None:
        run = state.runs[stage]
        self.metrics.run_ended(stage, lost or run.worker_died, run.stats)
        if run.handle_state is HandleState.OPEN:
            self._dispose(state.run, stage, run.handle, lost)
            run.handle_state = HandleState.GONE
        elif run.handle_state is HandleState.OPENING:
            run.handle_state = HandleState.ABANDON_LATER if lost else HandleState.CLOSE_LATER

    def _dispose(self, run: bytes, stage: str, handle: object, lost: bool) -> None:
        if lost:
            self._abandoned[run, stage] = handle
            self._opener.abandon(handle)
        else:
            self._opener.close(handle)

    def _end(self, state: RequestState, end: life.EndRequest) -> None:
        now, request_id = self._clock(), state.arrival.request_id
        last = end.error or Internal("failed without a reason")
        if end.outcome is not life.Outcome.FAILED:
            try:
                last = state.last_response(end, now)
            except Exception as error:  # loop boundary: an answer that cannot be joined is an error
                log.exception("request %s: answer could not be joined", request_id, extra={"request_id": request_id})
                last = Internal(describe(error))
                end = replace(end, outcome=life.Outcome.FAILED, error=last)
        state.end, state.ended_s = end, now
        for output, why in end.missing.items():
            facts = {"request_id": request_id}
            log.warning("request %s: output %s is missing: %s", request_id, output, why, extra=facts)
        self._count_end(state, end, now)
        if isinstance(last, OmniError):
            facts = logs.about(request_id, last)
            log.warning("request %s failed after %s: %s", request_id, state.usage(end), last.line(), extra=facts)
        state.arrival.responses.end(last)

    def _count_end(self, state: RequestState, end: life.EndRequest, now: float) -> None:
        outcome = end.error.code if end.error is not None else end.outcome.value
        self.metrics.ended(outcome, now - state.arrived_s, state.usage(end))
        for output, sent in state.sent.items():
            self.metrics.edge_ended(self.pipeline.output(output).stage, CLIENT, sent.transfer)
        if end.outcome is life.Outcome.CANCELLED and end.error is not None:
            self.metrics.cancelled.add(1, end.error.message)
        if end.outcome is life.Outcome.COMPLETED and state.player.audio_s:
            self.metrics.played(state.player, state.arrived_s)

    def _forget(self, state: RequestState) -> None:
        """Drop a request whose machine is done and whose handles are all disposed of."""
        if not state.forgettable:
            return
        self.admission.leave(state)
        if self.requests.pop(state.run, None) is None or state.end is None:  # None: it began again under another run
            return
        self._ended.add(state)
        if self.traces is not None:
            write(self.traces, state)

    # --- losses and time -----------------------------------------------------------------------------------------
    def _on_lost(self, peer: Peer, stage: str) -> None:
        for state in list(self.requests.values()):
            run = state.runs.get(stage)
            if run is not None and run.peer is peer:
                stub_died = run.stub is not None and run.stub.lost
                error = StageFailed("the stage's stub died", stage) if stub_died else WorkerDied(stage)
                self._on_failed(state.run, life.RunFailed(stage, error, lost=True))

    def _on_failed(self, run: bytes, event: life.RunFailed | life.OpenFailed) -> None:
        """Fail the request, or begin it again if a worker of a pool died before its client got any output."""
        state = self.requests.get(run)
        if state is None:
            return
        error = event.error
        stage = error.where or event.stage
        is_pool = self.deploy.workers.get(stage, 1) > 1
        if is_pool and isinstance(error, WorkerDied | Unavailable) and state.can_begin_again(stage):
            self._begin_again(state, stage)
        self._apply(state, event)

    def _begin_again(self, old: RequestState, stage: str) -> None:
        """Run a request again in all its stages, under a fresh run id. What the old runs still send is dropped."""
        request_id = old.arrival.request_id
        facts = {"request_id": request_id}
        log.warning("request %s begins again: a worker of stage %s died", request_id, stage, extra=facts)
        self.metrics.retries.add(1, stage)
        new = old.again(new_run_id(), life.RequestMachine(self.pipeline, old.machine.wanted, old.machine.needed))
        self.requests[new.run] = new
        self.admission.replace(old, new)
        old.ended_s = self._clock()
        self._apply(old, life.RequestSuperseded())
        new.arrival.responses.watch(self._posting(new.run, life.RequestCancelled(CLIENT_GONE)))
        self._apply(new, life.RequestAdmitted())

    def _check_deadlines(self, now: float) -> None:
        if self._opener.stuck:
            self._fail_unopened()
        if now >= self._next_publish:
            self._publish(now)
        for state in list(self.requests.values()):
            if state.machine.outcome is None:
                self._keep_up(state, now)
                error = state.expired(now)
                if error is not None:
                    state.last_activity_s = now
                    self._apply(state, life.RequestExpired(error, stalled=error.where == state.silent_at))
            elif state.ended_s is not None and now - state.ended_s > STOP_GRACE_S:
                self._give_up(state)

    def _keep_up(self, state: RequestState, now: float) -> None:
        """Give a stream whose client does not acknowledge more room as time passes, and a first event.

        Triton notices that a client of `/generate_stream` has left only after it has sent something.
        """
        if state.window is None or state.window.acknowledges:
            return
        state.window.elapse(now)
        self._resume(state)
        if not state.window.sent_bytes and now - state.arrived_s > ACCEPTED_S and state.machine.outcome is None:
            self._send_accepted(state)

    def _send_accepted(self, state: RequestState) -> None:
        state.mark_sent(0)
        self._send(state, Response(Event("accepted", state.arrival.request_id, token=state.take_token())))

    def _publish(self, now: float) -> None:
        """Bring the gauges up to date through an open request, whose end is sent after this.

        Without an open request Triton may be unloading this model, and then a call about metrics does not return.
        """
        state = next((state for state in self.requests.values() if state.machine.outcome is None), None)
        if state is not None:
            self._next_publish = now + PUBLISH_S
            state.arrival.responses.publish()

    def _fail_unopened(self) -> None:
        """The opener hangs: fail the runs that wait for it. Open runs are unaffected."""
        for state in list(self.requests.values()):
            for stage in state.machine.open_runs:
                if state.runs[stage].handle_state is HandleState.OPENING and state.runs[stage].peer is None:
                    self._on_open_failed(
                        state.run, stage, Unavailable("Triton is not accepting new BLS requests", stage)
                    )

    def _give_up(self, state: RequestState) -> None:
        """Close the runs of an ended request that did not stop."""
        for stage in state.machine.open_runs:
            error = DeadlineExceeded(f"did not stop within {STOP_GRACE_S:g} s", stage)
            request_id = state.arrival.request_id
            log.error("request %s: stage %s %s", request_id, stage, error.message, extra={"request_id": request_id})
            self._apply(state, life.RunFailed(stage, error, lost=True))
        for run in state.runs.values():
            run.handle_state = HandleState.GONE
        self._forget(state)
