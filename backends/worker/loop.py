# SPDX-License-Identifier: Apache-2.0
"""The engine worker's one loop: take what came in, feed the engine, step it, deliver what it made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.control.hub import Hub, Lost, Peer
from triton_omni.backends.control.messages import (
    INPUTS_EDGE,
    OUTPUT_PREFIX,
    AcceptedMessage,
    ConnectMessage,
    FailedMessage,
    FinishedMessage,
    OpenMessage,
    PingMessage,
    ProgressMessage,
    ReleaseMessage,
    StopMessage,
)
from triton_omni.backends.core import engine as eng
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.errors import (
    DeadlineExceeded,
    ErrorInfo,
    OmniError,
    StageFailed,
    Unavailable,
    WorkerDied,
)
from triton_omni.backends.core.generate import decode_request
from triton_omni.backends.core.outputs import OutputPiece
from triton_omni.backends.core.pipeline import Pipeline
from triton_omni.backends.telemetry.logs import about
from triton_omni.backends.worker.record import Record, Sink, Source, Waiting

log = logging.getLogger("triton_omni.worker")

TICK_S = 1.0  # sign of life to the stub, and the resolution of stall deadlines


class Worker:
    """Drives one engine for one stage instance. All state about a run is its Record."""

    def __init__(
        self, pipeline: Pipeline, stage: str, engine: eng.Engine, hub: Hub, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.pipeline = pipeline
        self.stage = pipeline.stage(stage)
        self.engine = engine
        self.hub = hub
        self.stub: Peer | None = None
        self.records: dict[bytes, Record] = {}
        self.numbers: dict[str, float] = {"steps": 0.0, "step_runs": 0.0, "step_s": 0.0, "turn_s": 0.0}
        self._unsettled: dict[Record, None] = {}
        """Runs that have something to send or an end to tell: few of many, looked at in every turn."""
        self._adapters = pipeline.feeds_of(stage)
        self._early_inputs: dict[bytes, tuple[Tensor, ...]] = {}
        self._clock = clock
        self._next_tick = 0.0

    def run_forever(self, stub: Peer) -> None:
        """Serve until the stub is gone."""
        self.stub = stub
        while not stub.lost:
            self.turn(0.0 if self.engine.has_work else max(0.0, self._next_tick - self._clock()))

    def turn(self, timeout_s: float) -> None:
        """One turn of the loop: receive, feed, step, deliver."""
        began = self._clock()
        items = self.hub.poll(timeout_s)
        if timeout_s:
            began = self._clock()  # waiting is no work
        with self.hub.joined():
            for peer, item in items:
                if peer is not None:
                    self._receive(peer, item)
            self._feed()
        events = self._step() if self.engine.has_work else ()
        with self.hub.joined():
            self._deliver(events)
            now = self._clock()
            if now >= self._next_tick:
                self._tick(now)
            self._settle()
        self.numbers["turn_s"] += self._clock() - began

    # --- receive -------------------------------------------------------------------------------------------------
    def _receive(self, peer: Peer, item: object) -> None:
        match item:
            case Chunk():
                self._on_chunk(peer, item)
            case OpenMessage():
                self._on_open(peer, item)
            case ConnectMessage():
                self._on_connect(peer, item)
            case StopMessage(run=run, consumer=consumer):
                self._on_stop(run, consumer)
            case ReleaseMessage(run=run):
                self._on_release(run)
            case FailedMessage(run=run, error=error):  # a producer tells its consumers why no more will come
                if run in self.records:
                    self._fail(self.records[run], error.error())
            case PingMessage():
                peer.send(self._ping())
            case Lost():
                self._on_lost(peer)
            case _:
                log.warning("unexpected message %s from %s", type(item).__name__, peer.name)

    def _on_open(self, stub: Peer, message: OpenMessage) -> None:
        inputs = self._early_inputs.pop(message.run, ())
        try:
            reply = self._connect(message.reply, "orchestrator") if message.reply else stub
            record = self._record(stub, reply, message, inputs)
            self.engine.open(record.run)
        except OmniError as error:
            self._refuse(stub, message.run, error)
        except Exception as error:  # loop boundary: a bug in one run must not end the others
            log.exception("open failed: request %s", message.request_id, extra={"request_id": message.request_id})
            self._refuse(stub, message.run, error)
        else:
            self.records[message.run] = record
            if not record.direct:
                reply.send(AcceptedMessage(message.run, self.hub.address))
            stub.send(AcceptedMessage(message.run, self.hub.address))
            if message.direct:
                self._feed_direct(record, inputs)

    def _record(self, stub: Peer, reply: Peer, message: OpenMessage, inputs: tuple[Tensor, ...]) -> Record:
        name = self.stage.name
        sinks = {target: Sink(None, name, True, target in message.optional) for target in message.consumers}
        sinks |= {(edge := OUTPUT_PREFIX + name): Sink(reply, edge, False) for name in message.wanted}
        if not message.reply and not message.wanted:  # a direct call of a stage without client outputs
            sinks[OUTPUT_PREFIX] = Sink(reply, OUTPUT_PREFIX, True)
        run = eng.Run(
            message.run,
            message.request_id,
            decode_request(message.request),
            {} if message.direct else {t.name: t for t in inputs},
            upstream=frozenset(message.upstream),
            wanted=frozenset(message.wanted),
            feeds=any(sink.feeds for sink in sinks.values()),
        )
        sources = {source: Source() for source in message.upstream}
        return Record(run, stub, reply, sinks, sources, message.stall_s, self._clock())

    def _on_connect(self, peer: Peer, message: ConnectMessage) -> None:
        record = self.records.get(message.run)
        sink = record.sinks.get(message.consumer) if record is not None and peer is record.reply else None
        if record is None or sink is None or record.end_sent:
            return  # late: the run is over, or goes on without this consumer
        try:
            sink.peer = self._connect(message.address, message.consumer)
            self._unsettled[record] = None
        except Unavailable as error:
            if sink.optional:
                self._drop_sink(record, message.consumer)
            else:
                self._fail(record, error)

    def _connect(self, address: str, whom: str) -> Peer:
        try:
            return self.hub.connect(address)
        except PeerLost:
            raise Unavailable(f"{whom} is not reachable", whom) from None

    def _refuse(self, stub: Peer, run: bytes, error: Exception) -> None:
        """The run never was ours: the stub closes Triton's side and tells the orchestrator."""
        stub.send(FailedMessage(run, ErrorInfo.of(error, self.stage.name)))

    def _feed_direct(self, record: Record, inputs: tuple[Tensor, ...]) -> None:
        """Turn a direct call's tensors into the one last chunk of its (only) upstream edge."""
        assert len(record.sources) == 1, "a direct call feeds exactly one edge"
        self._on_chunk(record.stub, Chunk(record.run.id, min(record.sources), 0, True, inputs))

    def _on_chunk(self, peer: Peer, chunk: Chunk) -> None:
        if chunk.edge == INPUTS_EDGE:
            # copied: a run may last minutes, and its media must not take the link's space from the next run's
            self._early_inputs[chunk.run] = tuple(Tensor(t.spec, bytes(t.data)) for t in chunk.tensors)
            peer.release(chunk)
            return
        record = self.records.get(chunk.run)
        source = None if record is None or record.ended is not None else record.sources.get(chunk.edge)
        if record is None or source is None or not source.is_open:
            peer.release(chunk)  # late: the run is over here
        else:
            self._queue(record, source, peer, chunk)

    def _queue(self, record: Record, source: Source, peer: Peer, chunk: Chunk) -> None:
        edge_stats = source.edge_stats
        if chunk.index != edge_stats.chunks:
            peer.release(chunk)
            where = f"{chunk.edge}->{self.stage.name}"
            self._fail(record, StageFailed(f"chunk {chunk.index} came instead of {edge_stats.chunks}", where))
            return
        record.active_at = now_s = self._clock()
        source.peer = peer
        source.is_open = not chunk.last
        edge_stats.chunks += 1
        edge_stats.nbytes += chunk.nbytes
        if chunk.sent_s:
            edge_stats.transfer_s += now_s - chunk.sent_s
        try:
            inputs = self._adapters[chunk.edge](chunk)
        except Exception as error:  # an adapter sees what another process sent; it must not take the loop along
            peer.release(chunk)
            request_id = record.run.request_id
            log.exception("adapter of %s: request %s", chunk.edge, request_id, extra={"request_id": request_id})
            if isinstance(error, KeyError):
                error = StageFailed(f"the chunk has no {error}", f"{chunk.edge}->{self.stage.name}")
            self._fail(record, ErrorInfo.of(error, self.stage.name).error())
            return
        record.inbox.append(Waiting(source, peer, chunk, inputs, now_s))

    def _on_stop(self, run: bytes, consumer: str) -> None:
        record = self.records.get(run)
        if record is None or record.end_sent:
            return
        if consumer:
            self._drop_sink(record, consumer)
        else:
            self._cut(record, FinishedMessage(run, "stopped"))

    def _drop_sink(self, record: Record, consumer: str) -> None:
        """Go on without a consumer; what waits for it is dropped."""
        record.sinks.pop(consumer, None)
        record.run.feeds = any(sink.feeds for sink in record.sinks.values())
        self._unsettled[record] = None

    def _on_release(self, run: bytes) -> None:
        record = self.records.get(run)
        if record is None or record.ended is None or not record.end_sent:
            return
        del self.records[run]
        if not record.direct:
            record.reply.send(record.ended)

    def _on_lost(self, peer: Peer) -> None:
        for record in [r for r in self.records.values() if not r.end_sent]:
            if peer is record.reply:
                gone = ErrorInfo(Unavailable.code, "the orchestrator died", "orchestrator")
                self._cut(record, FailedMessage(record.run.id, gone, reply_lost=True))
            else:
                self._fail_if_bound(record, peer)

    def _fail_if_bound(self, record: Record, peer: Peer) -> None:
        ended = record.ended is not None  # what waits to leave may still be lost, what came in no longer
        dead = [s for s, source in record.sources.items() if source.peer is peer and source.is_open and not ended]
        lost = [key for key, sink in record.sinks.items() if sink.peer is peer and (sink.queue or not ended)]
        for key in [key for key in lost if record.sinks[key].optional]:
            lost.remove(key)
            self._drop_sink(record, key)
        dead += lost
        if dead:
            self._fail(record, WorkerDied(dead[0]))

    # --- feed, step, deliver ---------------------------------------------------------------------------------------
    def _feed(self) -> None:
        """Offer waiting inputs to the engine; what it refuses stays unacknowledged."""
        for record in [r for r in self.records.values() if r.inbox]:
            try:
                while record.inbox:
                    waiting = record.inbox[0]
                    if not self.engine.feed(record.run, waiting.inputs, waiting.chunk.last):
                        break
                    record.inbox.popleft()
                    waiting.source.edge_stats.wait_s += self._clock() - waiting.arrived_s
                    waiting.peer.release(waiting.chunk)
            except OmniError as error:
                self._fail(record, error)
            except Exception as error:  # loop boundary: a bug over one input must not end the others
                request_id = record.run.request_id
                log.exception("feed failed: request %s", request_id, extra={"request_id": request_id})
                self._fail(record, ErrorInfo.of(error, self.stage.name).error())

    def _step(self) -> Sequence[eng.EngineEvent]:
        started = self._clock()
        try:
            events = self.engine.step()
        except Exception as error:  # loop boundary: its state is unknown now, so every run ends
            log.exception("step failed; %d runs end", len(self.records))
            info = ErrorInfo.of(error, self.stage.name)
            for record in [r for r in self.records.values() if r.ended is None]:
                self._end(record, FailedMessage(record.run.id, info))
            self._settle()
            raise
        self.numbers["steps"] += 1
        self.numbers["step_runs"] += len({event.run.id for event in events})
        self.numbers["step_s"] += self._clock() - started
        return events

    def _deliver(self, events: Sequence[eng.EngineEvent]) -> None:
        for event in events:
            record = self.records.get(event.run.id)
            if record is None or record.ended is not None:
                continue
            self._unsettled[record] = None
            match event:
                case eng.EngineChunk(_, tensors, piece, last):
                    self._note_first(record)
                    self._send(record, tensors, piece, last)
                case eng.EngineOutput(run, piece, tensors):
                    sink = record.sinks.get(OUTPUT_PREFIX + piece.kind)
                    if sink is not None:
                        self._note_first(record)
                        sink.add(run.id, tensors, piece, False)
                case eng.EngineProgress(run, done, total):
                    if not record.direct:
                        record.reply.send(ProgressMessage(run.id, done, total))
                case eng.EngineFinished(run, reason, usage):
                    self._send(record, (), None, True)
                    self._end(record, FinishedMessage(run.id, reason, usage))
                case eng.EngineFailed(run, error):
                    self._fail(record, error, engine_has_it=False)

    def _note_first(self, record: Record) -> None:
        if record.first_at is None:
            record.first_at = self._clock()

    def _send(self, record: Record, tensors: tuple[Tensor, ...], piece: OutputPiece | None, last: bool) -> None:
        """Queue a chunk for every consumer that has not had its last one."""
        for sink in record.sinks.values():
            if sink.feeds and not sink.closed:
                sink.add(record.run.id, tensors, piece, last)

    def _settle(self) -> None:
        """Send what there is credit for; tell the stub of runs that are over and whose chunks are all out."""
        for record in list(self._unsettled):
            clear = self._pump(record)
            record.run.blocked = any(sink.is_full for sink in record.sinks.values())
            # The stub lets go of a run that has ended. If we died then with `Accepted` unsent, none could report it.
            if not clear or (record.ended is not None and record.reply.connector.link.backlog_packets):
                continue
            del self._unsettled[record]
            if record.ended is not None and not record.end_sent:
                record.end_sent = True
                if not self._live:
                    record.stub.send(self._ping())  # the stub publishes numbers with the last end it hears of
                record.stub.send(record.ended)

    def _pump(self, record: Record) -> bool:
        """Send what there is credit for; True if nothing waits any more."""
        try:
            for sink in record.sinks.values():
                if sink.queue:
                    sink.pump(self._clock())
        except (TypeError, ValueError, OSError) as error:  # no such chunk can travel, or there is no memory for it
            request_id = record.run.request_id
            log.exception("a chunk cannot be sent: request %s", request_id, extra={"request_id": request_id})
            self._fail(record, StageFailed(f"a chunk cannot be sent: {error}", self.stage.name))
        return not any(sink.queue for sink in record.sinks.values())

    # --- ends ----------------------------------------------------------------------------------------------------
    def _fail(self, record: Record, error: OmniError, engine_has_it: bool = True) -> None:
        """End one run with an error, and tell its consumers why nothing more will come."""
        if record.end_sent:
            return
        info = ErrorInfo.of(error, self.stage.name)
        if record.direct:  # else the orchestrator logs the request's failure, once
            request_id = record.run.request_id
            log.warning("request %s failed: %s", request_id, info.error().line(), extra=about(request_id, info.error()))
        for key, sink in record.sinks.items():
            if sink.peer is not None and not key.startswith(OUTPUT_PREFIX):
                sink.peer.send(FailedMessage(record.run.id, info))
        self._cut(record, FailedMessage(record.run.id, info), engine_has_it)

    def _cut(self, record: Record, end: FinishedMessage | FailedMessage, engine_has_it: bool = True) -> None:
        """End a run before its time: also one that the engine is done with but whose chunks still wait to leave."""
        if record.ended is None and engine_has_it:
            self.engine.stop(record.run)
        self._end(record, end)

    def _end(self, record: Record, end: FinishedMessage | FailedMessage) -> None:
        """The run is over. A natural end waits for its chunks to leave; any other drops them."""
        outcome = "failed" if isinstance(end, FailedMessage) else "stopped" if end.reason == "stopped" else "finished"
        record.ended = msgspec.structs.replace(end, stats=record.stats(outcome, self._clock()))
        self._unsettled[record] = None
        record.release_inputs()
        if outcome != "finished":
            for sink in record.sinks.values():
                sink.queue.clear()

    def _tick(self, now: float) -> None:
        self._next_tick = now + TICK_S
        if self.stub is not None:
            self.stub.send(self._ping())
        for record in list(self.records.values()):
            silent = now - max(record.active_at, record.opened_at)
            if record.stall_s and record.open and not record.inbox and record.ended is None and silent > record.stall_s:
                edge = f"{min(record.open)}->{self.stage.name}"
                self._fail(record, DeadlineExceeded(f"no chunk for {silent:.1f} s", edge))

    def _ping(self) -> PingMessage:
        numbers = self.numbers | {"held": len(self.records)}
        return PingMessage(self.hub.name, "ready", self._live, self.hub.gpu_paths(), numbers)

    @property
    def _live(self) -> int:
        return sum(1 for r in self.records.values() if r.ended is None)
