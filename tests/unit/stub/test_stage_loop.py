# SPDX-License-Identifier: Apache-2.0
"""A stage's loop: when calls are acknowledged, who tells their ends in every order of events, and the worker's care."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kit.stage_harness import StageBench
from tests.kit.worker_harness import chat
from triton_omni.backends.control import messages as msg
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.errors import ErrorInfo, OmniError
from triton_omni.backends.core.outputs import AudioPiece, TextPiece
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE
from triton_omni.backends.stub.stage_loop import DIRECT_OUTPUT_BYTES, PUBLISH_S, STOPPED_S
from triton_omni.backends.stub.worker_process import FIRST_PAUSE_S, GIVE_UP_AFTER, LONGEST_PAUSE_S, STEADY_S
from triton_omni.backends.worker.loop import Worker

DIED = "[stage_failed:tokens] the stage's worker died"
FINAL = ("FINAL", None)


@pytest.fixture
def make(tmp_path):
    """Makes benches that are closed at the end."""
    made = []

    def bench(ready=True, **deploy):
        made.append(StageBench(tmp_path, **deploy))
        if ready:
            made[-1].worker_is_ready()
        return made[-1]

    yield bench
    for each in made:
        each.close()


def lines(ends):
    errors = [end.error.error() if isinstance(end, msg.FailedMessage) else end for end in ends]
    return [error.line() for error in errors if isinstance(error, OmniError)]


def refused(client):
    """Errors of a call that was answered with nothing else."""
    return lines([end for word, end in client.sent if word == "FINAL"]) if len(client.sent) == 1 else client.sent


# --- opening -----------------------------------------------------------------------------------------------------
def test_all_opens_of_one_long_step_join_at_its_end(make):
    """The worker is inside a step all the time; every call is acknowledged meanwhile, and one turn takes them all."""
    b, n = make(), 64
    engine = PIPELINE.stage("tokens").engine(EngineContext("toy", "tokens", {}))
    worker = Worker(PIPELINE, "tokens", engine, b.worker_process.theirs)
    calls = [b.call(request=chat(2)) for _ in range(n)]
    b.turn()
    assert [client.sent for client, _ in calls] == [["ack"]] * n
    assert {m.run for m in b.orchestrator.of(msg.ReceivedMessage)} == {run for _, run in calls}
    assert (len(worker.records), worker.numbers["steps"]) == (0, 0)
    worker.turn(0)
    assert (len(worker.records), worker.numbers["steps"]) == (n, 1)
    b.turn()
    assert len(b.orchestrator.of(msg.AcceptedMessage)) == n
    assert b.orchestrator.texts == ["w0 "] * n, "the first step was everybody's"


def test_an_orchestrators_call_is_received_acknowledged_and_handed_over(make):
    b = make()
    client, run = b.call()
    b.turn()
    assert client.sent == ["ack"]
    assert b.sent_to_orchestrator(run) == [msg.ReceivedMessage(run)]
    assert [type(m) for m in b.worker_reads()] == [msg.OpenMessage]


def test_a_run_that_is_open_already_is_refused_in_the_first_response(make):
    b = make()
    first, run = b.call()
    second, _ = b.call(run)
    b.turn()
    assert lines([second.sent[0][1]]) == ["[bad_request:open] this run is already open"]
    assert first.sent == ["ack"]
    assert b.sent_to_orchestrator(run) == [msg.ReceivedMessage(run)], "nothing is said of the first"


def test_a_call_of_a_dead_orchestrator_gets_nothing(make, tmp_path):
    """A send to it would block forever."""
    b = make()
    client, _ = b.call(reply=str(tmp_path / "gone.sock"))
    b.turn()
    assert client.sent == []
    assert b.worker_reads() == []


def test_inputs_wait_for_room_and_other_calls_do_not(make):
    b = make()
    large = Tensor.of("image", np.zeros(24 << 20, np.uint8))
    waiting = [b.call(None, large)[1] for _ in range(4)]
    _, small = b.call()
    b.turn()
    arrived = b.worker_reads()
    assert [m.run for m in arrived if isinstance(m, msg.OpenMessage)] == [*waiting[:2], small]
    for chunk in (m for m in arrived if isinstance(m, Chunk)):
        b.to_stub.release(chunk)
    b.turn()
    assert [m.run for m in b.worker_reads() if isinstance(m, msg.OpenMessage)] == waiting[2:]


# --- ends: one per run, FINAL first ------------------------------------------------------------------------------
def test_an_accepted_runs_end_is_sent_by_its_worker(make):
    b = make()
    client, run = b.call()
    b.turn()
    b.to_stub.send(msg.AcceptedMessage(run))
    b.to_stub.send(msg.FinishedMessage(run, "stop"))
    b.turn()
    assert client.sent == ["ack", FINAL]
    b.worker_reads()
    client.close()
    b.turn()
    assert b.worker_reads() == [msg.ReleaseMessage(run)]
    assert b.sent_to_orchestrator(run) == [msg.ReceivedMessage(run)]


def test_a_refused_runs_end_is_sent_by_us_after_its_final(make):
    b = make()
    client, run = b.call()
    b.turn()
    refusal = msg.FailedMessage(run, ErrorInfo("bad_request", "no such voice", "voice"))
    b.to_stub.send(refusal)
    b.turn()
    assert client.sent == ["ack", FINAL]
    assert b.sent_to_orchestrator(run) == [msg.ReceivedMessage(run)]
    client.close()
    b.turn()
    assert b.sent_to_orchestrator(run) == [msg.ReceivedMessage(run), refusal]
    assert [type(m) for m in b.worker_reads()] == [msg.OpenMessage], "nothing to release"


@pytest.mark.parametrize("accepted", [False, True])
def test_a_death_ends_every_call_the_worker_had(make, accepted):
    """Also of a run that it has accepted: its message to the orchestrator may have been lost with it."""
    b = make()
    client, run = b.call()
    b.turn()
    if accepted:
        b.to_stub.send(msg.AcceptedMessage(run))
    b.worker_dies()
    b.turn()
    assert client.sent == ["ack", FINAL]
    client.close()
    b.turn()
    assert lines(b.sent_to_orchestrator(run)) == [DIED]
    assert b.worker_process.state == "restarting"


def test_a_death_between_the_last_word_and_the_release_is_a_failure(make):
    """What the worker had not sent yet is lost, so the run must not look complete."""
    b = make()
    client, run = b.call()
    b.turn()
    b.to_stub.send(msg.AcceptedMessage(run))
    b.to_stub.send(msg.FinishedMessage(run, "stop"))
    b.turn()
    b.worker_dies()
    b.turn()
    assert client.sent == ["ack", FINAL]
    client.close()
    b.turn()
    assert lines(b.sent_to_orchestrator(run)) == [DIED]


def test_a_death_while_inputs_wait_ends_those_calls_too(make):
    b = make()
    large = Tensor.of("image", np.zeros(24 << 20, np.uint8))
    calls = [b.call(None, large) for _ in range(4)]
    b.turn()
    b.worker_dies()
    b.turn()
    for client, _ in calls:
        client.close()
    b.turn()
    assert [lines(b.sent_to_orchestrator(run)) for _, run in calls] == [[DIED]] * 4


def test_calls_are_refused_at_once_while_there_is_no_worker(make):
    b = make()
    b.worker_dies()
    b.turn()
    client, run = b.call()
    b.turn()
    assert refused(client) == ["[unavailable:tokens] the stage is restarting"]
    assert b.sent_to_orchestrator(run) == [], "its orchestrator may try another instance: this one never had the run"


@pytest.mark.parametrize("seen_by", ["death", "by the worker"])
def test_nothing_is_sent_through_triton_to_an_orchestrator_that_died(make, seen_by):
    b = make()
    client, run = b.call()
    b.turn()
    b.to_stub.send(msg.AcceptedMessage(run))
    b.turn()
    b.orchestrator_dies()
    if seen_by == "death":
        b.loop.turn(0)
        b.worker_dies()
        b.loop.turn(0)
    else:
        b.to_stub.send(msg.FailedMessage(run, ErrorInfo("unavailable", "the orchestrator died"), reply_lost=True))
        b.loop.turn(0)
        assert b.worker_reads()[-1] == msg.ReleaseMessage(run)
    assert client.sent == ["ack"]


# --- direct calls ------------------------------------------------------------------------------------------------
def test_a_direct_call_gets_its_pieces_and_its_end(make):
    b = make()
    client, run = b.call(reply="")
    b.turn()
    b.to_stub.send(msg.AcceptedMessage(run))
    for index in range(2):
        assert b.to_stub.put(Chunk(run, "@text", index, piece=TextPiece("x")))
    end = msg.FinishedMessage(run, "length")
    b.to_stub.send(end)
    b.turn()
    assert client.sent[:2] == [("text", 0), ("text", 1)]
    event = client.sent[2][1].event
    assert (event.type, event.stage, event.index, event.finish_reason) == ("end", "tokens", 2, "length")
    b.worker_reads()
    client.close()
    b.turn()
    assert b.worker_reads() == [msg.ReleaseMessage(run)]
    assert b.to_stub.connector.in_flight == 0
    assert b.orchestrator.got == []


def put_all(b, run, count, nbytes):
    """Offer outputs as the worker does; returns how many of them found credit."""
    large = Tensor.of("audio", np.zeros(nbytes, np.uint8))
    sent = 0
    while sent < count and b.to_stub.put(
        Chunk(run, "@audio", sent, tensors=(large,), piece=AudioPiece(24_000, 24_000))
    ):
        sent += 1
        b.turn()
    return sent


def test_a_direct_call_is_sent_output_at_a_pace_and_its_end_last(make):
    b = make()
    client, run = b.call(reply="")
    b.turn()
    b.to_stub.send(msg.AcceptedMessage(run))
    nbytes = DIRECT_OUTPUT_BYTES // 16
    count = put_all(b, run, 9, nbytes)
    b.to_stub.send(msg.FinishedMessage(run, "stop"))
    b.turn()
    burst = len(client.sent)
    assert 2 <= burst < count and not client.over
    assert b.to_stub.connector.in_flight > 0, "what waits holds its credit: the stage pauses"
    for _ in range(20):
        b.clock.now_s += 0.5  # a second of audio in each piece
        b.turn()
    assert client.sent[:-1] == [("audio", index) for index in range(count)] and client.over


@pytest.mark.parametrize("cause", ["client", "worker", "failure"])
def test_what_waits_for_a_direct_call_is_given_back_when_that_ends(make, cause):
    b = make()
    client, run = b.call(reply="")
    b.turn()
    b.to_stub.send(msg.AcceptedMessage(run))
    put_all(b, run, 9, DIRECT_OUTPUT_BYTES // 16)
    sent = len(client.sent)
    if cause == "client":
        client.gone()
        b.turn()
        b.to_stub.send(msg.FinishedMessage(run, "stopped"))
    elif cause == "failure":
        b.to_stub.send(msg.FailedMessage(run, ErrorInfo("stage_failed", "lost", "tokens")))
    else:
        b.worker_dies()
    b.turn()
    assert client.over and len(client.sent) == sent + 1
    if cause != "worker":
        b.worker_reads()
        assert b.to_stub.connector.in_flight == 0


def test_a_direct_call_whose_client_leaves_is_stopped(make):
    b = make()
    client, run = b.call(reply="")
    b.turn()
    client.gone()
    b.turn()
    assert b.worker_reads()[-1] == msg.StopMessage(run)


def test_a_direct_call_whose_client_leaves_before_there_is_room_never_reaches_the_worker(make):
    b = make()
    large = Tensor.of("image", np.zeros(24 << 20, np.uint8))
    calls = [b.call(None, large, reply="") for _ in range(3)]
    b.turn()
    client, _ = calls[2]
    client.gone()
    b.turn()
    assert lines([client.sent[-1][1]]) == ["[cancelled:tokens] client_gone"]
    arrived = b.worker_reads()
    for chunk in (m for m in arrived if isinstance(m, Chunk)):
        b.to_stub.release(chunk)
    b.turn()
    assert [m.run for m in arrived + b.worker_reads() if isinstance(m, msg.OpenMessage)] == [
        run for _, run in calls[:2]
    ]


def test_a_direct_call_hears_of_a_death(make):
    b = make()
    client, _ = b.call(reply="")
    b.turn()
    b.worker_dies()
    b.turn()
    assert lines([client.sent[-1][1]]) == [DIED]


# --- the worker --------------------------------------------------------------------------------------------------
def test_a_first_worker_that_cannot_load_is_the_models_error(make):
    b = make(ready=False)
    b.to_stub.send(msg.PingMessage("toy/tokens", "failed", 0, "no weights"))
    b.worker_dies()
    b.turn()
    assert (b.loop.start_decided, b.loop.start_error) == (True, "no weights")
    b.clock.now_s += 1_000
    b.turn()
    assert b.worker_process.theirs is None, "it is not started again"


def test_the_paths_of_gpu_tensors_are_the_live_workers(make):
    b = make()
    b.to_stub.send(msg.PingMessage("toy/tokens", "ready", 0, "toy/codes: GPU memory"))
    b.turn()
    assert b.worker_process.gpu_paths == "toy/codes: GPU memory"
    b.worker_dies()
    b.turn()
    assert b.worker_process.gpu_paths == ""


def test_a_first_worker_killed_while_loading_is_the_models_error(make):
    b = make(ready=False)
    b.worker_dies()
    b.turn()
    assert b.loop.start_error == "the engine worker died while loading"


@pytest.mark.parametrize("first", [True, False])
def test_a_slow_load_is_left_alone_and_one_beyond_its_bound_is_killed(make, first):
    b = make(ready=not first, hang_s=2, start_timeout_s=100)
    if not first:
        b.worker_dies()
        b.turn()
        b.clock.now_s += FIRST_PAUSE_S
        b.turn()
    kills = b.worker_process.kills
    b.clock.now_s += 100
    b.turn()
    assert b.worker_process.kills == kills, "hang_s does not bound a load"
    b.clock.now_s += 0.1
    b.turn()
    assert b.worker_process.kills > kills
    assert b.loop.start_error == ("the engine was not ready within 100 s" if first else "")
    assert b.worker_process.state == ("starting" if first else "restarting")


def test_no_bound_means_no_bound(make):
    b = make(ready=False, start_timeout_s=0, hang_s=0)
    b.clock.now_s += 1e6
    b.turn()
    b.worker_is_ready()
    b.clock.now_s += 1e6
    b.turn()
    assert b.worker_process.kills == 0


def test_a_hung_worker_is_killed_and_its_calls_fail(make):
    b = make(hang_s=5)
    client, run = b.call()
    b.turn()
    b.clock.now_s += 4
    b.to_stub.send(msg.PingMessage("toy/tokens", "ready"))
    b.turn()
    b.clock.now_s += 5
    b.turn()
    assert client.sent == ["ack"], "time counts from the last sign of life"
    b.clock.now_s += 0.1
    b.turn()
    client.close()
    b.turn()
    assert lines(b.sent_to_orchestrator(run)) == [DIED]
    b.clock.now_s += FIRST_PAUSE_S
    b.turn()
    b.worker_is_ready()


def test_a_stopped_worker_is_not_ready_and_replaced_before_it_counts_as_hung(make):
    b = make(hang_s=120)
    b.worker_process.stopped = True
    b.turn()
    assert b.loop.state == "stuck"
    client, _ = b.call()
    b.turn()
    assert refused(client) == ["[unavailable:tokens] the stage's worker is stopped"]
    b.worker_process.stopped = False
    b.turn()
    assert b.loop.state == "ready" and b.worker_process.kills == 0
    b.worker_process.stopped = True
    b.turn()
    b.clock.now_s += STOPPED_S + 0.1
    b.turn()
    assert b.worker_process.kills > 0


def test_deaths_in_a_row_wait_longer_each_time_and_then_it_gives_up(make):
    b = make()
    pauses = []
    for _ in range(GIVE_UP_AFTER - 1):
        b.worker_dies()
        b.turn()
        pauses.append(b.worker_process.retry_s - b.clock.now_s)
        b.clock.now_s += pauses[-1] - 0.01
        b.turn()
        assert b.worker_process.theirs is None, "not before it is due"
        b.clock.now_s += 0.02
        b.turn()
        b.worker_is_ready()
    assert pauses == pytest.approx([min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**i) for i in range(GIVE_UP_AFTER - 1)])
    b.worker_dies()
    b.turn()
    b.clock.now_s += 1e6
    b.turn()
    assert (b.worker_process.state, b.worker_process.theirs) == ("gave_up", None)
    client, _ = b.call()
    b.turn()
    assert refused(client) == ["[unavailable:tokens] the stage's worker died too often and is not restarted"]


def test_metrics_are_published_through_an_open_call(make):
    """Gauges read 0 while a stalled stage held 64 runs: they were published at the end of calls only."""
    b = make()
    client, run = b.call()
    b.turn()
    first = client.published
    b.clock.now_s += PUBLISH_S + 0.1
    b.turn()
    assert client.published == first + 1
    b.to_stub.send(msg.FinishedMessage(run, "stop"))
    b.turn()
    b.clock.now_s += 10 * PUBLISH_S
    b.turn()
    assert client.published == first + 1, "Triton may unload a model without open calls"


def test_a_death_after_a_steady_life_resets_the_back_off(make):
    b = make()
    for _ in range(GIVE_UP_AFTER + 2):
        b.clock.now_s += STEADY_S
        b.worker_dies()
        b.turn()
        b.clock.now_s += FIRST_PAUSE_S
        b.turn()
        b.worker_is_ready()
    assert (b.worker_process.state, b.worker_process.restarts) == ("ready", GIVE_UP_AFTER + 2)


# --- a pool ------------------------------------------------------------------------------------------------------
@pytest.fixture
def pool(make):
    """Two ready workers."""
    b = make(ready=False, workers=2)
    for number in (0, 1):
        b.worker_is_ready(number)
    return b


def opens(b, number):
    return [m.run for m in b.worker_reads(number) if isinstance(m, msg.OpenMessage)]


def test_the_stage_is_decided_when_each_worker_is(make):
    b = make(ready=False, workers=2)
    b.worker_is_ready(0)
    assert not b.loop.start_decided
    b.pool[1].stub.send(msg.PingMessage("toy/tokens", "failed", text="no memory"))
    b.turn()
    assert b.loop.start_decided and b.loop.start_error == "", "one that works is enough"


def test_a_pool_that_cannot_start_is_the_models_error(make):
    b = make(ready=False, workers=2)
    for number in (0, 1):
        b.pool[number].stub.send(msg.PingMessage("toy/tokens", "failed", text=f"no memory {number}"))
    b.turn()
    assert b.loop.start_error == "no memory 0"


def test_runs_go_to_the_least_busy_worker(pool):
    runs = [pool.call()[1] for _ in range(4)]
    pool.turn()
    taken = [opens(pool, 0), opens(pool, 1)]
    assert [len(each) for each in taken] == [2, 2]
    assert sorted(taken[0] + taken[1]) == sorted(runs)
    pool.pool[0].stub.send(msg.FailedMessage(taken[0][0], ErrorInfo("bad_request", "no")))
    pool.turn()
    _, run = pool.call()
    pool.turn()
    assert opens(pool, 0) == [run], "the end of a run makes room"


def test_a_run_that_was_not_accepted_is_taken_by_the_other_worker_with_its_inputs(pool):
    audio = Tensor.of("codes", np.arange(6, dtype=np.int16))
    client, run = pool.call(None, audio)
    pool.turn()
    victim = 0 if any(isinstance(m, msg.OpenMessage) for m in pool.worker_reads(0)) else 1
    pool.worker_dies(victim)
    pool.turn()
    chunk, opened = [m for m in pool.worker_reads(1 - victim) if isinstance(m, Chunk | msg.OpenMessage)]
    assert np.frombuffer(chunk.tensors[0].data, np.int16).tolist() == list(range(6))
    assert opened.run == run
    assert client.sent == ["ack"]
    assert pool.loop.moved_runs == 1
    pool.worker_dies(1 - victim)
    pool.turn()
    assert client.sent == ["ack", FINAL], "a run is moved once"
    client.close()
    pool.turn()
    assert lines(pool.sent_to_orchestrator(run)) == [DIED]


def test_an_accepted_run_ends_with_its_worker_and_the_others_go_on(pool):
    calls = [pool.call() for _ in range(2)]
    pool.turn()
    victim = 0 if calls[0][1] in opens(pool, 0) else 1
    for number, (_, run) in ((victim, calls[0]), (1 - victim, calls[1])):
        pool.pool[number].stub.send(msg.AcceptedMessage(run))
    pool.turn()
    pool.worker_dies(victim)
    pool.turn()
    assert calls[0][0].sent == ["ack", FINAL]
    assert calls[1][0].sent == ["ack"]
    assert pool.loop.state == "ready"


def test_runs_wait_for_a_worker_while_both_are_down_and_no_longer_than_they_may(pool):
    for number in (0, 1):
        pool.worker_dies(number)
    pool.turn()
    (patient, run), (short, _) = pool.call(wait_s=60.0), pool.call(wait_s=0.1)
    direct, _ = pool.call(reply="")
    pool.turn()
    assert patient.sent == short.sent == ["ack"]
    assert refused(direct) == ["[unavailable:tokens] the stage is restarting"]
    pool.clock.now_s += FIRST_PAUSE_S + 0.01
    pool.turn()
    assert short.sent == ["ack", FINAL]
    pool.worker_is_ready(1)
    assert opens(pool, 1) == [run]


def test_a_drained_worker_ends_its_runs_and_gets_no_other(pool):
    pool.loop.workers[0].is_drained = True
    runs = [pool.call()[1] for _ in range(3)]
    pool.turn()
    assert (opens(pool, 0), opens(pool, 1)) == ([], runs)


def test_affinity_keeps_requests_that_begin_alike_on_one_worker(make):
    b = make(ready=False, workers=2, route="affinity")
    for number in (0, 1):
        b.worker_is_ready(number)
    clients = [b.call(request=chat(n + 1)) for n in range(3)]
    b.turn()
    assert sorted([len(opens(b, 0)), len(opens(b, 1))]) in ([0, 3], [1, 2])
    assert len(clients) == 3


def test_a_worker_that_never_starts_again_leaves_the_pool_ready(pool):
    pool.pool[0]._backoff.deaths = GIVE_UP_AFTER - 1
    pool.pool[0].ready_s = pool.clock.now_s
    pool.worker_dies(0)
    pool.turn()
    assert (pool.pool[0].state, pool.loop.state) == ("gave_up", "ready")
    _, run = pool.call()
    pool.turn()
    assert opens(pool, 1) == [run]
