# SPDX-License-Identifier: Apache-2.0
"""The worker's loop with the toy engines and real sockets; only the test moves time and turns."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from tests.kit.worker_harness import bench, chat, chunk
from triton_omni.backends.connectors.base import INLINE_BYTES, WINDOW_CHUNKS
from triton_omni.backends.control import messages as msg
from triton_omni.backends.control.hub import Peer
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import EngineChunk, EngineFinished, EngineOutput
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.outputs import AudioPiece, TextPiece
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.toy.engines import SAMPLES_PER_FRAME, sine
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE

RUN = b"r" * 16


def engine(stage):
    return PIPELINE.stage(stage).engine(EngineContext("toy", stage, {}))


class Patient:
    """An engine that takes nothing until it is allowed to."""

    def __init__(self, inner):
        self._inner = inner
        self.takes = False

    def feed(self, run, inputs, last):
        return self.takes and self._inner.feed(run, inputs, last)

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.fixture
def at(tmp_path):
    """Makes a bench around one stage."""
    made = []

    def make(stage, own_engine=None):
        context = bench(tmp_path, PIPELINE, stage, own_engine or engine(stage))
        made.append(context)
        return context.__enter__()

    yield make
    for context in made:
        context.__exit__(None, None, None)


def feeds(b, run, *pairs, name="frames", edge="frames"):
    """A producer's chunks: (index, rows, last)."""
    peer = b.producer(name)
    for index, rows, last in pairs:
        tensors = (Tensor.of("frames", np.full((rows, 8), 7, np.float32)),) if rows else ()
        assert peer.put(chunk(run, edge, index, last, *tensors))
    return peer


def freed(b, run):
    """The run is forgotten."""
    return run not in b.worker.records


def refusal_of(b, run):
    """The refusal of a run: the stub alone hears of it, and nothing of the run is left."""
    b.until(lambda: b.stub.of(msg.FailedMessage))
    b.turn(2)
    [end] = b.stub.of(msg.FailedMessage)
    assert end.run == run
    assert run not in b.worker.records
    assert b.worker.engine._runs == []
    assert b.stub.of(msg.AcceptedMessage) == b.orchestrator.got == []
    assert b.to_worker.connector.in_flight == 0
    return end


def end_of(b, run):
    b.until(lambda: any(type(m) in (msg.FinishedMessage, msg.FailedMessage) for m in b.stub.got))
    b.release(run)
    b.until(lambda: freed(b, run))
    b.turn()
    return b.stub.of(msg.FailedMessage) + b.stub.of(msg.FinishedMessage)


# --- a whole life --------------------------------------------------------------------------------------------------
def test_accepted_goes_to_the_orchestrator_before_the_stub_hears_it(at, monkeypatch):
    """The link is up before Triton's acknowledgement: no moment in which a run has no owner."""
    b = at("tokens")
    order = []
    send = Peer.send

    def noted(peer, message):
        if isinstance(message, msg.AcceptedMessage):
            order.append((peer, message))
        return send(peer, message)

    monkeypatch.setattr(Peer, "send", noted)
    run = b.open(wanted=("text",))
    b.until(lambda: b.stub.of(msg.AcceptedMessage))
    accepted = msg.AcceptedMessage(run, b.hub.address)
    assert order == [(b.hub.connect(b.orchestrator.hub.address), accepted), (b.worker.stub, accepted)]
    b.turn()
    assert b.orchestrator.got[0] == accepted


def test_outputs_then_the_stub_then_the_orchestrator_hears_the_end(at):
    """FINAL before END: the stub closes Triton's side first, and only its Release lets the end out."""
    b = at("tokens")
    run = b.open(wanted=("text",), request=chat(3))
    b.until(lambda: b.stub.of(msg.FinishedMessage))
    b.turn(20)
    assert b.orchestrator.texts == ["w0 ", "w1 ", "w2 "]
    assert b.orchestrator.of(msg.FinishedMessage) == []
    b.release(run)
    b.until(lambda: b.orchestrator.of(msg.FinishedMessage))
    stats = msg.RunStats("finished", 0.0, 0.0)
    end = msg.FinishedMessage(run, "length", {"prompt_tokens": 3, "completion_tokens": 3}, stats)
    assert b.stub.of(msg.FinishedMessage) == b.orchestrator.of(msg.FinishedMessage) == [end]
    assert [c.index for c in b.orchestrator.of(Chunk)] == [0, 1, 2]
    assert freed(b, run)


def test_the_last_stage_joins_its_inputs_into_audio(at):
    b = at("wave")
    run = b.open(upstream=("frames",), wanted=("audio",))
    feeds(b, run, (0, 2, False), (1, 3, False), (2, 0, True))
    b.until(lambda: b.stub.of(msg.FinishedMessage))
    assert b"".join(b.orchestrator.payloads) == sine(0, 5 * SAMPLES_PER_FRAME).tobytes()


def test_chunks_that_arrive_before_their_open_are_given_back(at):
    """A producer never sends before the consumer accepted; what comes for an unknown run must not pile up."""
    b = at("wave")
    peer = feeds(b, RUN, (0, 2, False), (1, 2, False))
    b.until(lambda: peer.connector.in_flight == 0)
    assert not b.worker.records


def test_the_client_wants_text_only_and_consumers_get_nothing(at):
    b = at("tokens")
    run = b.open(wanted=(), consumers={}, request=chat(2))
    end_of(b, run)
    assert b.orchestrator.of(Chunk) == []


def test_inputs_give_their_room_back_at_once_and_stay_whole_for_the_run(at):
    b = at("tokens", Scripted())
    for i in range(5):  # twice as much as the link has room for
        given = Tensor.of("image", np.full(24 << 20, i, np.uint8))
        assert b.to_worker.put(chunk(bytes([i]) * 16, msg.INPUTS_EDGE, 0, False, given))
        b.open(bytes([i]) * 16, wanted=("text",), has_inputs=True)
        b.until(lambda: b.to_worker.connector.in_flight == 0)
    images = [np.frombuffer(run.inputs["image"].data, np.uint8) for run in b.worker.engine.runs]
    assert [(len(set(image[:: 1 << 16])), image[0]) for image in images] == [(1, i) for i in range(5)]


def test_a_ping_is_answered_with_the_state(at):
    b = at("tokens")
    b.open(wanted=("text",), request=chat(50))
    b.turn(3)
    prober = b.side("prober")
    peer = prober.hub.connect(b.hub.address)
    peer.send(msg.PingMessage())
    b.worker.turn(0)
    b.worker.turn(0)
    [ping] = [item for _, item in prober.hub.poll(1.0) if isinstance(item, msg.PingMessage)]
    assert (ping.name, ping.state, ping.live) == ("toy/tokens", "ready", 1)
    assert set(ping.numbers) == {"steps", "step_runs", "step_s", "turn_s", "held"}
    b.kill("prober")
    b.turn(2)


# --- back-pressure ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("burst", [1, 100])
def test_a_consumer_that_holds_its_chunks_stops_the_producer(at, burst):
    b = at("tokens")
    consumer = b.side("consumer")
    consumer.keeps_chunks = True
    request = chat(1_000, tokens={"burst": burst, "frame_bytes": 9_000})
    run = b.open(consumers={"frames": consumer.hub.address}, request=request)
    b.turn(200)
    record = b.worker.records[run]
    assert record.run.blocked
    made = record.run.state.made
    assert made <= WINDOW_CHUNKS + burst, "one step more than the window at most"
    assert len(record.sinks["frames"].queue) <= burst
    assert len(consumer.of(Chunk)) == WINDOW_CHUNKS
    b.turn(50)
    assert record.run.state.made == made
    consumer.keeps_chunks = False
    consumer.give_back()
    b.until(lambda: b.stub.of(msg.FinishedMessage))
    assert [c.index for c in consumer.of(Chunk)] == list(range(1_001)), "and a last, empty one"
    assert consumer.got[-1].last


def test_an_engine_that_takes_no_more_leaves_chunks_unacknowledged(at):
    b = at("wave")
    run = b.open(upstream=("frames",), wanted=("audio",), request=chat(wave={"hold_after": 0}))
    peer = feeds(b, run, *((i, 1, False) for i in range(8)))
    b.turn(20)
    assert peer.connector.in_flight == 4, "the toy takes four"
    b.stop(run)
    b.until(lambda: peer.connector.in_flight == 0)


def test_the_end_says_what_every_edge_carried_and_its_times(at):
    b = at("wave", Patient(engine("wave")))
    run = b.open(upstream=("frames",), wanted=("audio",))
    b.until(lambda: b.stub.of(msg.AcceptedMessage))
    peer = b.producer("frames")
    for index, last in ((0, False), (1, True)):
        frames = Tensor.of("frames", np.full((2, 8), 7, np.float32))
        sent = chunk(run, "frames", index, last, frames)
        sent.sent_s = b.clock.now_s - 0.5
        assert peer.put(sent)
    b.turn(2)
    b.clock.now_s += 2.0  # the engine takes nothing meanwhile
    b.worker.engine.takes = True
    b.until(lambda: b.stub.of(msg.FinishedMessage))
    [end] = b.stub.of(msg.FinishedMessage)
    assert end.stats == msg.RunStats("finished", 2.0, 2.0, {"frames": msg.Transfer(2, 2 * 64, 1.0, 4.0)})


def test_a_natural_end_waits_for_its_chunks_to_leave(at):
    b = at("tokens")
    b.orchestrator.keeps_chunks = True
    run = b.open(wanted=("text",), request=chat(20, tokens={"burst": 20}))
    b.turn(50)
    assert b.worker.records[run].ended is not None
    assert b.stub.of(msg.FinishedMessage) == []
    b.orchestrator.keeps_chunks = False
    b.orchestrator.give_back()
    b.until(lambda: b.stub.of(msg.FinishedMessage))
    assert len(b.orchestrator.texts) == 20


# --- stop ----------------------------------------------------------------------------------------------------------
def test_stop_frees_within_one_step(at):
    b = at("tokens")
    run = b.open(wanted=("text",), request=chat(1_000))
    b.turn(5)
    b.stop(run)
    b.turn(1)
    assert b.worker.engine._runs == []
    assert b.stub.of(msg.FinishedMessage) == [
        msg.FinishedMessage(run, "stopped", stats=msg.RunStats("stopped", 0.0, 0.0))
    ]
    seen = len(b.orchestrator.texts)
    b.turn(5)
    assert len(b.orchestrator.texts) == seen
    b.stop(run)  # again, and of an unknown run
    b.stop(b"x" * 16)
    b.turn(2)
    assert len(b.stub.of(msg.FinishedMessage)) == 1
    b.release(run)
    b.until(lambda: b.orchestrator.of(msg.FinishedMessage))
    assert freed(b, run)


def test_stop_ends_a_run_whose_chunks_are_not_taken(at):
    """The engine is done, its last chunks wait for credit that will never come: Stop must still end the run."""
    b = at("tokens")
    consumer = b.side("consumer")
    consumer.keeps_chunks = True
    run = b.open(consumers={"frames": consumer.hub.address}, request=chat(30, tokens={"burst": 30}))
    b.turn(20)
    assert b.worker.records[run].ended is not None
    assert b.stub.of(msg.FinishedMessage) == []
    b.stop(run)
    b.turn(2)
    assert [m.reason for m in b.stub.of(msg.FinishedMessage)] == ["stopped"]
    b.release(run)
    b.until(lambda: freed(b, run))


def test_releases_of_unknown_runs_and_early_releases_change_nothing(at):
    b = at("tokens")
    run = b.open(wanted=("text",), request=chat(1_000))
    b.turn(3)
    b.release(b"x" * 16)
    b.release(run)
    b.turn(3)
    assert run in b.worker.records, "a run that goes on is not forgotten"
    b.stop(run)
    b.turn(2)
    b.release(run)
    b.until(lambda: b.orchestrator.of(msg.FinishedMessage))


# --- failures ------------------------------------------------------------------------------------------------------
def test_a_failing_run_tells_its_consumers_who_failed(at):
    b = at("tokens")
    consumer = b.side("consumer")
    run = b.open(consumers={"frames": consumer.hub.address}, request=chat(9, tokens={"fail_after": 2}))
    [end] = end_of(b, run)
    assert end.error.error().line() == "[stage_failed:tokens] failed on request"
    assert consumer.of(msg.FailedMessage)[0].error == end.error
    assert b.orchestrator.of(msg.FailedMessage) == [end]


def test_a_consumer_that_hears_of_it_fails_with_the_producers_name(at):
    b = at("wave")
    run = b.open(upstream=("frames",), wanted=("audio",))
    peer = feeds(b, run, (0, 2, False))
    error = msg.ErrorInfo("stage_failed", "boom", "tokens")
    peer.send(msg.FailedMessage(run, error))
    peer.send(msg.FailedMessage(b"x" * 16, error))  # of a run that is over here
    [end] = end_of(b, run)
    assert end.error == error
    assert b.worker.engine._runs == []
    assert peer.connector.in_flight == 0


def test_a_refused_run_is_reported_to_the_stub_alone(at):
    """The orchestrator hears of it from the stub, after Triton's FINAL."""
    b = at("tokens")
    given = Tensor.of("audio", np.zeros(20_000, np.float32))
    assert b.to_worker.put(chunk(RUN, msg.INPUTS_EDGE, 0, True, given))
    b.open(RUN, wanted=("text",), has_inputs=True, request=chat(3, tokens={"refuse": True}))
    end = refusal_of(b, RUN)
    assert end.error.code == "bad_request"
    assert end.error.where == "stages.tokens.refuse"


def test_a_request_that_cannot_be_read_is_refused(at):
    b = at("tokens")
    b.to_worker.send(msg.OpenMessage(RUN, "req", b"{not json", b.orchestrator.hub.address, wanted=("text",)))
    assert refusal_of(b, RUN).error.code == "bad_request"


def test_an_engine_that_breaks_in_open_refuses_only_this_run(at):
    own = engine("tokens")
    opened = own.open
    own.open = lambda run: opened(run) if run.id != RUN else 1 / 0
    b = at("tokens", own)
    good = b.open(wanted=("text",))
    b.open(RUN, wanted=("text",))
    b.until(lambda: len(b.stub.of(msg.FinishedMessage)) == 1 and b.stub.of(msg.FailedMessage))
    [end] = b.stub.of(msg.FailedMessage)
    assert end.run == RUN
    assert "ZeroDivisionError" in end.error.message
    assert b.stub.of(msg.FinishedMessage)[0].run == good


def test_a_missing_orchestrator_refuses_the_run_by_name(at):
    b = at("tokens")
    run = b.open(wanted=("text",), reply="/nowhere/none.sock")
    end = refusal_of(b, run)
    assert (end.error.code, end.error.where) == ("unavailable", "orchestrator")


def test_a_missing_consumer_fails_the_run_by_name(at):
    b = at("tokens")
    run = b.open(wanted=("text",), consumers={"frames": "/nowhere/none.sock"}, request=chat(10_000))
    [end] = end_of(b, run)
    assert (end.error.code, end.error.where) == ("unavailable", "frames")


# --- consumers that accept later than the run -----------------------------------------------------------------------
def test_a_run_works_ahead_of_a_consumer_that_has_not_accepted_and_then_pauses(at):
    b = at("tokens")
    consumer = b.side("consumer")
    run = b.open(late=("frames",), wanted=("text",), request=chat(100))
    b.turn(50)
    record = b.worker.records[run]
    assert len(b.orchestrator.texts) == WINDOW_CHUNKS, "text leaves meanwhile, up to the bound on waiting chunks"
    assert record.run.blocked and len(record.sinks["frames"].queue) == WINDOW_CHUNKS
    b.connect(run, "frames", consumer.hub.address)
    b.connect(run, "unknown", consumer.hub.address)
    end_of(b, run)
    assert [c.index for c in consumer.of(Chunk)] == list(range(101)), "all of them, in order"


def test_a_run_that_has_ended_keeps_its_chunks_for_a_consumer_that_accepts_later(at):
    b = at("tokens")
    consumer = b.side("consumer")
    run = b.open(late=("frames",), request=chat(3))
    b.turn(20)
    assert b.worker.records[run].ended is not None
    assert b.stub.of(msg.FinishedMessage) == [], "it is not over while a chunk waits"
    b.connect(run, "frames", consumer.hub.address)
    end_of(b, run)
    assert [c.last for c in consumer.of(Chunk)] == [False] * 3 + [True]


@pytest.mark.parametrize("ended", [True, False])
def test_a_stop_while_a_consumer_has_not_accepted_ends_the_run(at, ended):
    b = at("tokens")
    consumer = b.side("consumer")
    run = b.open(late=("frames",), request=chat(3 if ended else 10_000))
    b.turn(20)
    b.stop(run)
    b.connect(run, "frames", consumer.hub.address)
    [end] = end_of(b, run)
    assert end.reason == "stopped"
    assert consumer.of(Chunk) == []
    assert freed(b, run)


def test_an_orchestrator_alone_connects_consumers_of_its_runs(at):
    b = at("tokens")
    consumer = b.side("consumer")
    run = b.open(late=("frames",), request=chat(3))
    b.turn(20)
    b.to_worker.send(msg.ConnectMessage(run, "frames", consumer.hub.address))
    b.turn(20)
    assert consumer.of(Chunk) == [], "any process that can reach the socket could redirect the run"
    b.stop(run)
    end_of(b, run)


def test_a_gap_in_the_chunks_fails_the_run_and_names_the_edge(at):
    b = at("wave")
    run = b.open(upstream=("frames",), wanted=("audio",))
    other = b.open(upstream=("frames",), wanted=("audio",))
    peer = feeds(b, run, (0, 2, False), (2, 2, False))
    feeds(b, other, (0, 2, True))
    b.until(lambda: b.stub.of(msg.FailedMessage) and b.stub.of(msg.FinishedMessage))
    assert (
        b.stub.of(msg.FailedMessage)[0].error.error().line() == "[stage_failed:frames->wave] chunk 2 came instead of 1"
    )
    assert b.stub.of(msg.FinishedMessage)[0].run == other
    b.until(lambda: peer.connector.in_flight == 0)


def test_a_repeated_chunk_is_a_gap_too(at):
    b = at("wave")
    run = b.open(upstream=("frames",), wanted=("audio",))
    feeds(b, run, (0, 2, False), (0, 2, False))
    [end] = end_of(b, run)
    assert "chunk 0 came instead of 1" in end.error.message


def test_chunks_of_an_edge_that_is_none_are_given_back(at):
    b = at("wave")
    run = b.open(upstream=("frames",), wanted=("audio",))
    peer = feeds(b, run, (0, 2, False), edge="tokens")
    b.until(lambda: peer.connector.in_flight == 0)
    feeds(b, run, (0, 2, True))
    end_of(b, run)
    assert len(b.orchestrator.payloads) == 1


def test_an_adapter_that_fails_ends_only_this_run(at):
    b = at("wave")
    run = b.open(upstream=("frames",), wanted=("audio",))
    other = b.open(upstream=("frames",), wanted=("audio",))
    peer = b.producer("frames")
    wrong = Tensor.of("frames", np.zeros((3, 5), np.float32))
    bad = Chunk(run, "frames", 0, False, (wrong,), TextPiece(token_ids=(3,)))
    assert peer.put(bad)
    feeds(b, other, (0, 2, True))
    b.until(lambda: b.stub.of(msg.FailedMessage) and b.stub.of(msg.FinishedMessage))
    assert [m.run for m in b.stub.of(msg.FailedMessage)] == [run]
    assert [m.run for m in b.stub.of(msg.FinishedMessage)] == [other]
    b.until(lambda: peer.connector.in_flight == 0)


def test_a_chunk_without_what_the_adapter_reads_fails_its_run_naming_edge_and_key(at):
    b = at("wave")
    run = b.open(upstream=("frames",), wanted=("audio",))
    peer = b.producer("frames")
    assert peer.put(Chunk(run, "frames", 0, False, (Tensor.of("framez", np.zeros((3, 5), np.float32)),)))
    b.until(lambda: b.stub.of(msg.FailedMessage))
    (failed,) = b.stub.of(msg.FailedMessage)
    assert failed.error.where == "frames->wave" and "'frames'" in failed.error.message


def test_an_engine_that_breaks_in_a_step_ends_every_run_and_the_worker(at):
    b = at("tokens")
    first = b.open(wanted=("text",), request=chat(100))
    second = b.open(wanted=("text",), request=chat(100, tokens={"raise_after": 3}))
    with pytest.raises(RuntimeError, match="raised on request"):
        b.turn(50)
    b.stub.read()
    assert {m.run for m in b.stub.of(msg.FailedMessage)} == {first, second}
    assert {m.error.where for m in b.stub.of(msg.FailedMessage)} == {"tokens"}
    assert "RuntimeError: raised on request" in b.stub.of(msg.FailedMessage)[0].error.message


class Scripted:
    """An engine whose steps are given; for what no toy does."""

    has_work = True

    def __init__(self, *steps):
        self.steps = list(steps)
        self.runs = []
        self.stopped = []

    def open(self, run):
        self.runs.append(run)

    def feed(self, run, inputs, last):
        return True

    def stop(self, run):
        self.stopped.append(run)

    def step(self):
        return self.steps.pop(0)(self.runs) if self.steps and self.runs else ()

    def close(self):
        pass


def test_a_chunk_that_cannot_be_sent_fails_its_run_at_once(at):
    """#8082: a failed put is a failure of the request now, not of the worker and not at the deadline."""
    b = at("tokens", Scripted(lambda runs: [EngineOutput(r, TextPiece(object())) for r in runs[:1]]))
    bad, good = b.open(wanted=("text",)), b.open(wanted=("text",))
    b.until(lambda: b.stub.of(msg.FailedMessage))
    [end] = b.stub.of(msg.FailedMessage)
    assert end.run == bad
    assert end.error.where == "tokens"
    assert b.worker.records[good].ended is None
    assert [run.id for run in b.worker.engine.stopped] == [bad]


def test_a_chunk_for_which_there_is_no_descriptor_fails_its_run_alone(at):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def too_much(runs):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        return [EngineOutput(runs[0], TextPiece("x"), (Tensor.of("x", np.zeros(INLINE_BYTES + 1, np.uint8)),))]

    b = at("tokens", Scripted(*[lambda runs: ()] * 5, too_much, lambda runs: [EngineOutput(runs[1], TextPiece("x"))]))
    bad, good = b.open(wanted=("text",)), b.open(wanted=("text",))
    try:
        b.until(lambda: b.stub.of(msg.FailedMessage))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    [end] = b.stub.of(msg.FailedMessage)
    assert (end.run, end.error.where) == (bad, "tokens")
    b.until(lambda: b.orchestrator.of(Chunk))
    assert b.worker.records[good].ended is None


def test_the_stub_hears_no_end_while_the_acceptance_waits_to_leave(at):
    """It would let go of the run; if the worker died then, none could tell the orchestrator."""

    def flood(runs):
        reply = b.worker.records[runs[0].id].reply
        for _ in range(60):
            reply.send(msg.PingMessage("x" * 30_000))
        return ()

    b = at("tokens", Scripted(*[flood] * 5, lambda runs: [EngineFinished(runs[1])]))
    slow = b.side("slow")
    try:
        del b.sides["slow"]  # it reads nothing for now
        b.open(reply=slow.hub.address)
        b.until(lambda: b.worker.records and next(iter(b.worker.records.values())).reply.connector.link.backlog_packets)
        run = b.open(reply=slow.hub.address)
        b.turn(50)
        assert b.worker.records[run].ended is not None
        assert b.stub.of(msg.FinishedMessage) == []
    finally:
        b.sides["slow"] = slow
    b.until(lambda: b.stub.of(msg.FinishedMessage))
    assert [m.run for m in slow.of(msg.AcceptedMessage)][-1] == run


def test_late_events_of_the_engine_change_nothing(at):
    def late(runs):
        output = EngineOutput(runs[0], TextPiece("late"))
        return [output, EngineChunk(runs[0]), EngineFinished(runs[0])]

    b = at("tokens", Scripted(lambda runs: [EngineFinished(runs[0], "stop")], late, late))
    run = b.open(wanted=("text",))
    b.turn(5)
    assert b.stub.of(msg.FinishedMessage) == [msg.FinishedMessage(run, "stop", stats=msg.RunStats("finished", 0.0))]
    assert b.orchestrator.texts == []


def test_an_unwanted_output_is_dropped(at):
    b = at("tokens", Scripted(lambda runs: [EngineOutput(runs[0], AudioPiece(24_000, 0)), EngineFinished(runs[0])]))
    run = b.open(wanted=("text",))
    end_of(b, run)
    assert b.orchestrator.of(Chunk) == []


def test_edges_that_the_engine_ended_itself_get_no_second_end(at):
    b = at(
        "tokens",
        Scripted(lambda runs: [EngineChunk(runs[0], piece=TextPiece("a"), last=True), EngineFinished(runs[0])]),
    )
    consumer = b.side("consumer")
    run = b.open(consumers={"frames": consumer.hub.address})
    end_of(b, run)
    assert [(c.index, c.last, c.piece) for c in consumer.of(Chunk)] == [(0, True, TextPiece("a"))]


# --- losses --------------------------------------------------------------------------------------------------------
def test_a_lost_consumer_fails_the_run_by_name(at):
    b = at("tokens")
    b.side("frames")
    run = b.open(consumers={"frames": b.sides["frames"].hub.address}, wanted=("text",), request=chat(10_000))
    b.turn(3)
    b.kill("frames")
    [end] = end_of(b, run)
    assert (end.error.code, end.error.where) == ("stage_failed", "frames")


def test_a_consumer_lost_after_the_engine_was_done_still_ends_the_run(at):
    """Chunks that wait for a dead consumer must not keep Triton's side open forever."""
    b = at("tokens")
    b.side("frames").keeps_chunks = True
    run = b.open(consumers={"frames": b.sides["frames"].hub.address}, request=chat(30, tokens={"burst": 30}))
    b.turn(20)
    assert b.worker.records[run].ended is not None
    assert b.stub.of(msg.FinishedMessage) == []
    b.kill("frames")
    [end] = end_of(b, run)
    assert isinstance(end, msg.FailedMessage)
    assert end.error.where == "frames"


@pytest.mark.parametrize("loss", ["died", "dropped", "never there"])
def test_a_run_goes_on_without_an_optional_consumer(at, loss):
    """It holds its chunks, then is lost: what waits for it is dropped, and nothing more is made for it."""
    b = at("tokens")
    consumer, other = b.side("frames"), b.side("other")
    consumer.keeps_chunks = True
    at_address = {"frames": consumer.hub.address, "other": other.hub.address}
    if loss == "never there":
        at_address["frames"] += "x"
    run = b.open(consumers=at_address, optional=("frames",), wanted=("text",), request=chat(200))
    if loss != "never there":
        b.turn(100)
        assert b.worker.records[run].run.blocked, "the stage would wait for it"
    if loss == "died":
        b.kill("frames")
    elif loss == "dropped":
        b.to_worker.send(msg.StopMessage(run, "frames"))
        b.to_worker.send(msg.StopMessage(run, "unknown"))
    [end] = end_of(b, run)
    assert isinstance(end, msg.FinishedMessage) and end.reason == "length"
    assert [c.index for c in other.of(Chunk)] == list(range(201))
    consumer.give_back()


def test_a_run_whose_only_consumer_is_dropped_makes_no_chunks(at):
    b = at("tokens")
    b.side("frames").keeps_chunks = True
    request = chat(50, tokens={"frame_bytes": 100})
    run = b.open(
        consumers={"frames": b.sides["frames"].hub.address}, optional=("frames",), wanted=("text",), request=request
    )
    b.turn(40)
    b.to_worker.send(msg.StopMessage(run, "frames"))
    [end] = end_of(b, run)
    assert end.reason == "length" and not b.worker.records
    b.sides["frames"].give_back()


def test_a_lost_orchestrator_ends_the_run_without_a_word_to_triton(at):
    b = at("tokens")
    run = b.open(wanted=("text",), request=chat(10_000))
    b.turn(3)
    b.kill("orchestrator")
    [end] = end_of(b, run)
    assert end.reply_lost
    assert end.error.where == "orchestrator"
    assert b.worker.engine._runs == []


def test_an_orchestrator_lost_after_the_engine_was_done_still_ends_the_run(at):
    b = at("tokens")
    b.orchestrator.keeps_chunks = True
    run = b.open(wanted=("text",), request=chat(30, tokens={"burst": 30}))
    b.turn(20)
    assert b.worker.records[run].ended is not None
    b.kill("orchestrator")
    [end] = end_of(b, run)
    assert end.reply_lost


def test_a_lost_producer_fails_the_runs_it_fed_and_no_other(at):
    b = at("wave")
    fed, ended, other = (b.open(upstream=("frames",), wanted=("audio",)) for _ in range(3))
    feeds(b, fed, (0, 2, False))
    feeds(b, ended, (0, 2, True))
    feeds(b, other, (0, 2, False), name="another instance")
    b.until(lambda: b.stub.of(msg.FinishedMessage))
    b.kill("frames")
    b.until(lambda: b.stub.of(msg.FailedMessage))
    b.turn(5)
    assert [(m.run, m.error.where) for m in b.stub.of(msg.FailedMessage)] == [(fed, "frames")]
    assert b.worker.records[other].ended is None


def test_a_lost_stub_ends_the_loop(at):
    b = at("tokens")
    b.open(wanted=("text",))
    b.turn(2)
    b.kill("stub")
    b.worker.run_forever(b.worker.stub)
    assert b.worker.stub.lost


# --- deadlines -------------------------------------------------------------------------------------------------------
def test_a_silent_edge_names_both_ends(at):
    b = at("wave")
    run = b.open(upstream=("frames",), wanted=("audio",), stall_s=5.0)
    b.turn(2)
    b.clock.now_s += 4.0
    feeds(b, run, (0, 2, False))
    b.turn(5)
    b.clock.now_s += 4.9
    b.turn(3)
    assert b.stub.of(msg.FailedMessage) == [], "time counts from the last chunk"
    b.clock.now_s += 1.2
    b.turn()
    assert b.stub.of(msg.FailedMessage), "sent in the same turn: the next one may be a second away"
    [end] = end_of(b, run)
    assert end.error.error().line() == "[deadline_exceeded:frames->wave] no chunk for 6.1 s"


@pytest.mark.parametrize(("options", "stall_s"), [({}, 0.0), ({"hold_after": 0}, 5.0)])
def test_an_edge_is_not_silent_without_limit_or_while_chunks_wait_here(at, options, stall_s):
    b = at("wave")
    run = b.open(upstream=("frames",), wanted=("audio",), stall_s=stall_s, request=chat(wave=options))
    feeds(b, run, *((i, 1, False) for i in range(6)))
    b.turn(3)
    b.clock.now_s += 10_000
    b.turn(3)
    assert b.stub.of(msg.FailedMessage) == []


# --- direct calls ----------------------------------------------------------------------------------------------------
def test_a_direct_call_of_an_entry_stage_answers_the_stub(at):
    b = at("tokens")
    run = b.open(reply="", wanted=("text",), request=chat(2))
    b.until(lambda: b.stub.of(msg.FinishedMessage))
    assert b.stub.texts == ["w0 ", "w1 "]
    b.release(run)
    b.until(lambda: freed(b, run))
    assert b.orchestrator.got == []
    assert len(b.stub.of(msg.FinishedMessage)) == 1
    assert len(b.stub.of(msg.AcceptedMessage)) == 1


def test_a_direct_call_of_a_middle_stage_shows_its_chunks(at):
    b = at("frames")
    run = b.open(reply="", request=GenerateRequest("speech", input="three short words"))
    b.until(lambda: b.stub.of(msg.FinishedMessage))
    got = b.stub.of(Chunk)
    assert {c.edge for c in got} == {"@"}
    assert [c.piece and c.piece.token_ids for c in got] == [(0,), (1,), (2,), None]
    assert got[-1].last
    assert run in b.worker.records


def test_a_direct_call_with_tensors_is_one_last_chunk(at):
    b = at("wave")
    rows = Tensor.of("frames", np.full((100, 8), 1, np.float32))
    for run in (RUN, b"s" * 16):
        assert b.to_worker.put(chunk(run, msg.INPUTS_EDGE, 0, True, rows))
        b.open(run, reply="", upstream=("frames",), wanted=("audio",), has_inputs=True, direct=True)
        b.until(lambda: b.stub.of(msg.FinishedMessage))
        assert len(b.stub.payloads[-1]) == 100 * 240 * 4
        b.until(lambda: b.to_worker.connector.in_flight == 0)
        b.release(run)
        b.until(lambda run=run: freed(b, run))
        b.stub.got.clear()


def test_progress_goes_to_orchestrators_only(at):
    b = at("tokens")
    b.open(wanted=("text",), request=chat(2, tokens={"progress": True}))
    b.until(lambda: b.stub.of(msg.FinishedMessage))
    assert [m.done for m in b.orchestrator.of(msg.ProgressMessage)] == [0, 1]
    b.stub.got.clear()
    b.open(reply="", wanted=("text",), request=chat(2, tokens={"progress": True}))
    b.until(lambda: b.stub.of(msg.FinishedMessage))
    assert b.stub.of(msg.ProgressMessage) == []


def test_messages_that_make_no_sense_are_ignored(at):
    b = at("tokens")
    b.to_worker.send(msg.AcceptedMessage(RUN))
    b.to_worker.send(msg.FinishedMessage(RUN, "stop"))
    b.turn(2)
    run = b.open(wanted=("text",))
    assert [end.reason for end in end_of(b, run)] == ["length"]


def test_time_in_steps_and_in_turns_is_separate(at):
    slow = engine("tokens")
    b = at("tokens", slow)
    inner = slow.step

    def step():
        b.clock.now_s += 2.0
        return inner()

    slow.step = step
    b.worker.turn(0)
    assert (b.worker.numbers["turn_s"], b.worker.numbers["step_s"]) == (0.0, 0.0)
    b.open(RUN)
    b.until(lambda: b.worker.numbers["steps"] == 1)
    assert b.worker.numbers["turn_s"] == b.worker.numbers["step_s"] == 2.0
