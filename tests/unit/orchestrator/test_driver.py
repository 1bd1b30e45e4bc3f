# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's loop with fake clients, a fake opener and scripted stages; only the test moves time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kit.orchestrator_harness import ScriptedStage, audio_tensor, chat, scene
from triton_omni.backends.control import messages as msg
from triton_omni.backends.core.chunk import Tensor, TensorSpec
from triton_omni.backends.core.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    StageFailed,
    TooBusy,
    Unavailable,
    WorkerDied,
)
from triton_omni.backends.core.generate import (
    Deadlines,
    GenerateRequest,
    ImageParams,
    Message,
    Part,
    SpeechParams,
    TranscriptionParams,
)
from triton_omni.backends.core.ids import RUN_ID_BYTES
from triton_omni.backends.core.output_window import RESPONSE_BYTES
from triton_omni.backends.core.outputs import AudioPiece, ImagePiece, TextPiece
from triton_omni.backends.core.pipeline import Operation, Output
from triton_omni.backends.core.responses import RequestTrace
from triton_omni.backends.orchestrator.driver import PUBLISH_S, STOP_GRACE_S
from triton_omni.backends.orchestrator.request_state import HandleState
from triton_omni.backends.orchestrator.status import KEPT_TRACES
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE
from triton_omni.backends.wire import Progress, StageStatus, text_of

ORDER = ("wave", "frames", "tokens")  # consumers first


@pytest.fixture
def play(tmp_path):
    """Makes a scene; when the test is over nothing may be left of any request."""
    made = []

    def make(pipeline=PIPELINE, **limits):
        context = scene(tmp_path, pipeline, **limits)
        made.append((context, context.__enter__()))
        return made[-1][1]

    yield make
    for context, s in made:
        try:
            s.check_empty()
        finally:
            context.__exit__(None, None, None)


def speaking(s, request=None, **more):
    """A request for text and audio whose three runs are open."""
    client = s.ask(request or chat("text", "audio"), **more)
    for _ in ORDER:
        s.accept()
    return client, client.run


def end_all(s, run, *stages):
    for stage in stages or ("tokens", "frames", "wave"):
        s.finish(stage, run, "stopped")


# --- whole lives ------------------------------------------------------------------------------------------
def test_a_whole_life(play):
    s = play()
    client = s.ask(chat("text", "audio"), "my-id")
    opened = [s.accept() for _ in ORDER]
    run = client.run
    assert {m.run for m in opened} == {run}
    assert len(run) == RUN_ID_BYTES
    assert {m.request_id for m in opened} == {"my-id"}
    assert [tuple(m.consumers) for m in opened] == [(), ("wave",), ("frames",)]
    for stage, consumer in (("tokens", "frames"), ("frames", "wave")):
        [connect] = [item for item in s.stages[stage].got if isinstance(item, msg.ConnectMessage)]
        assert connect == msg.ConnectMessage(run, consumer, s.stages[consumer].hub.address)
    assert [m.upstream for m in opened] == [("frames",), ("tokens",), ()]
    assert [m.wanted for m in opened] == [("audio",), (), ("text",)]
    s.stages["tokens"].put(run, 0, TextPiece("hello "))
    s.turn()
    s.clock.now_s += 1.5
    s.stages["wave"].put(run, 0, AudioPiece(24_000, 30_000), audio_tensor(30_000, 0.5))
    s.stages["tokens"].put(run, 1, TextPiece("world"))
    s.turn()
    s.finish("tokens", run, "length", completion_tokens=2)
    s.finish("frames", run)
    assert not client.over
    s.finish("wave", run, "stop", audio_samples=30_000)
    assert client.text == "hello world"
    assert [(e.type, e.stage, e.index) for e in client.events if e.type == "text"] == [
        ("text", "tokens", 0), ("text", "tokens", 1)]  # fmt: skip
    [audio] = [p for p in client.pieces if p.event.type == "audio"]
    assert audio.event.piece == AudioPiece(24_000, 30_000)
    end = client.ended.event
    assert (end.type, end.outcome, end.output, end.stage) == ("end", "completed", "audio", "wave")
    assert (end.finish_reason, end.request_id) == ("length", "my-id")
    assert end.usage == {"completion_tokens": 2, "audio_samples": 30_000}
    assert end.timings["first_audio_s"] == 1.5
    assert end.timings["total_s"] == 1.5
    assert s.opener.closed == s.opener.handles[::-1], "each as soon as its run is over"
    assert s.orchestrator.metrics.requests.values == {("completed",): 1, ("cancelled",): 0}
    assert s.orchestrator.metrics.opened.values == dict.fromkeys([(stage,) for stage in ORDER], 1)


def test_text_alone_opens_no_speech_stage(play):
    s = play()
    client = s.ask(chat("text"))
    opened = s.accept()
    assert (opened.wanted, opened.consumers, opened.upstream) == (("text",), (), ())
    assert s.opener.calls == []
    s.finish("tokens", client.run)
    assert client.ended.event.stage == "tokens"
    assert s.orchestrator.metrics.opened.values == {("tokens",): 1, ("frames",): 0, ("wave",): 0}


def test_requests_are_listed_oldest_first_with_age_phase_and_stages(play):
    s = play(max_live=2)
    client, run = speaking(s, request_id="first")
    s.pass_time(2.0)
    s.stages["tokens"].put(run, 0, TextPiece("word "))
    second = s.ask(chat("text"), "second")
    s.ask(chat("text"), "third")
    s.turn()
    asked = s.ask(GenerateRequest(operation="requests"))
    listed = asked.ended.event.status.requests
    assert [(r.id, r.age_s, r.phase) for r in listed] == [
        ("first", 2.0, "answering"), ("second", 0.0, "opening"), ("third", 0.0, "waiting")]  # fmt: skip
    assert set(listed[0].stages) == set(ORDER)
    assert listed[0].pieces == {"text": 1, "audio": 0}
    assert asked.ended.event.status.queued == 1
    for each in ("first", "second", "third"):
        s.ask(GenerateRequest(operation="abort", target=each))
    assert client.ended.event.outcome == second.ended.event.outcome == "cancelled"
    _, opened, _ = s.take_call()
    s.stages["tokens"].reply(s.hub.address, msg.AcceptedMessage(second.run, s.stages["tokens"].hub.address))
    s.answer(opened)
    s.finish("tokens", second.run, "stopped")
    end_all(s, run)


def test_an_ended_request_is_traced_by_its_id(play):
    s = play()
    client, run = speaking(s, request_id="mine")
    s.stages["tokens"].put(run, 0, TextPiece("word "))
    s.pass_time(1.0)
    for stage in ORDER[::-1]:
        s.finish(stage, run)
    assert client.ended.event.outcome == "completed"
    s.pass_time(5.0)
    [trace] = s.ask(GenerateRequest(operation="requests", target="mine")).ended.event.status.traces
    assert (trace.id, trace.operation, trace.outcome) == ("mine", "chat", "completed")
    assert (trace.total_s, trace.ended_s) == (1.0, 5.0)
    names = [span.name for span in trace.spans]
    assert names[0] == "queue" and {*ORDER, "client text"} <= set(names)
    assert all(0 <= span.start_s <= span.end_s for span in trace.spans)
    for target in ("other", ""):
        assert s.ask(GenerateRequest(operation="requests", target=target)).ended.event.status.traces == ()


def test_the_ring_of_traces_is_bounded_and_keeps_no_media(play):
    s = play()
    kept = s.orchestrator._ended._traces
    for number in range(KEPT_TRACES + 3):
        client = s.ask(chat("text"), f"r{number}")
        s.accept()
        s.finish("tokens", client.run)
    assert len(kept) == KEPT_TRACES and kept[0][1].id == "r3"
    assert all(isinstance(trace, RequestTrace) for _, trace in kept)


def test_collected_is_the_streamed_pieces_joined(play):
    s = play()
    whole, run = speaking(s, chat("text", "audio", stream=False))
    streamed, run2 = speaking(s)
    for r in (run, run2):
        for i, word in enumerate(("one ", "two ", "", "three")):
            s.stages["tokens"].put(r, i, TextPiece(word))
            s.stages["wave"].put(r, i, AudioPiece(24_000, 10 * i), audio_tensor(10 * i, i))
            s.turn()
        s.stages["tokens"].link.send(msg.ProgressMessage(r, 1, 4))
        for stage in ("tokens", "frames", "wave"):
            s.finish(stage, r)
    assert whole.pieces == []
    piece = whole.ended
    assert text_of(piece.event) == streamed.text == "one two three"
    audio = b"".join(bytes(t.data) for p in streamed.pieces for t in p.tensors)
    [tensor] = piece.tensors
    assert bytes(tensor.data) == audio
    assert (tensor.name, tensor.spec.shape) == ("audio", (60,))
    assert piece.event.joined["audio"] == AudioPiece(24_000, 60)
    assert piece.event.counts == {"text": 4, "audio": 4}
    assert [e.progress for e in streamed.events if e.type == "progress"] == [Progress(1, 4)]


def test_collected_without_text_says_no_text(play):
    s = play()
    client, run = speaking(s, chat("audio", stream=False))
    end_order = ("tokens", "frames", "wave")
    for stage in end_order:
        s.finish(stage, run)
    assert text_of(client.ended.event) is None
    assert client.ended.tensors == ()


def test_an_answer_that_cannot_be_joined_is_an_error_and_counted_as_one(play):
    s = play()
    client, run = speaking(s, chat("audio", stream=False))
    s.stages["wave"].put(run, 0, AudioPiece(24_000, 1), Tensor.of("audio", np.zeros((), np.float32)))
    s.turn()
    for stage in ("tokens", "frames", "wave"):
        s.finish(stage, run)
    assert isinstance(client.failed, Internal)
    ends = s.orchestrator.metrics.requests.values
    assert (ends["internal",], ends["completed",]) == (1, 0)


def test_previews_are_left_out_of_the_one_response(play):
    images = (Output("text", "tokens"), Output("image", "wave"))
    s = play(replace(PIPELINE, outputs=images, operations=(Operation("chat", "tokens", ("image",)),)))
    client, run = speaking(s, chat("image", stream=False))
    s.stages["wave"].put(run, 0, ImagePiece(partial=True), Tensor.of("image", np.zeros((2, 3, 3), np.uint8)))
    s.stages["wave"].put(run, 1, ImagePiece(seed=7), Tensor.of("image", np.ones((2, 3, 3), np.uint8)))
    s.turn()
    for stage in ("tokens", "frames", "wave"):
        s.finish(stage, run)
    [image] = client.ended.tensors
    assert bytes(image.data) == bytes([1] * 18)
    assert client.ended.event.joined["image"].seed == 7
    assert client.ended.event.counts["image"] == 1


def test_many_requests_live_side_by_side(play):
    s = play()
    first, second = s.ask(chat("text"), "same"), s.ask(chat("text"), "same")
    a, b = s.accept(), s.accept()
    assert {a.run, b.run} == {first.run, second.run}
    s.stages["tokens"].put(second.run, 0, TextPiece("b"))
    s.stages["tokens"].put(first.run, 0, TextPiece("a"))
    s.turn()
    assert (first.text, second.text) == ("a", "b")
    s.finish("tokens", second.run)
    s.finish("tokens", first.run)


# --- refused at once -----------------------------------------------------------------------------------------
REFUSED = [
    (chat("smell"), {}, "modalities"),
    (GenerateRequest("sing"), {}, "operation"),
    (GenerateRequest("speech"), {}, "input"),
    (GenerateRequest(), {}, "messages"),
    (chat(speech=SpeechParams(voice="bob")), {}, "speech.voice"),
    (chat(speech=SpeechParams(instructions="softly")), {}, "speech.instructions"),
    (chat(image=ImageParams(width=64)), {}, "image.width"),
    (chat(transcription=TranscriptionParams(word_timestamps=True)), {}, "transcription.word_timestamps"),
    (chat(stages={"nose": {}}), {}, "stages.nose"),
    (chat(stages={"tokens": {"burst": 0}}), {}, "stages.tokens.burst"),
    (chat(), {"audio": 5}, "audio"),
]


@pytest.mark.parametrize(("request_", "media", "field"), REFUSED)
def test_bad_requests_never_reach_a_stage(play, request_, media, field):
    s = play()
    client = s.ask(request_, **media)
    assert isinstance(client.failed, BadRequest)
    assert client.failed.where == field
    assert s.opener.calls == []
    assert client.run == b""
    assert s.orchestrator.metrics.requests.values["bad_request",] == 1


@pytest.mark.parametrize("request_id", ["x" * 257, "a\nb", "\x00", "\u202e"])
def test_hostile_ids_are_refused(play, request_id):
    s = play()
    assert s.ask(chat(), request_id).failed.where == "id"


def test_a_bug_in_a_check_answers_its_request_and_costs_no_other(play):
    def buggy(request):
        if request.speech.voice:
            raise ZeroDivisionError

    s = play(replace(PIPELINE, check=buggy))
    turn, s.turn = s.turn, lambda count=2: None
    bad = s.ask(chat("text", speech=SpeechParams(voice="x")))
    good = s.ask(chat("text"))
    s.turn = turn
    s.turn()
    assert isinstance(bad.failed, Internal)
    s.accept()
    s.finish("tokens", good.run)
    assert good.ended is not None


# --- admission ------------------------------------------------------------------------------------------
def test_limits_of_work_and_queue(play):
    s = play(max_live=1, max_queue=2)
    working, waiting, later, refused = (s.ask(chat("text")) for _ in range(4))
    assert isinstance(refused.failed, TooBusy)
    assert refused.failed.retry_after_s
    assert s.orchestrator.admission.queued == 2
    for client in (working, waiting, later):
        s.accept()
        assert not client.over
        s.finish("tokens", client.run)
        assert client.ended is not None


def test_requests_that_come_at_once_are_counted_at_once(play):
    s = play(max_live=1, max_queue=1)
    clients = []
    turn, s.turn = s.turn, lambda count=2: None
    clients = [s.ask(chat("text")) for _ in range(4)]
    s.turn = turn
    s.turn()
    assert [type(c.failed) for c in clients] == [type(None), type(None), TooBusy, TooBusy]
    for client in clients[:2]:
        s.accept()
        s.finish("tokens", client.run)


def test_priority_goes_first_then_who_came_first(play):
    s = play(max_live=1)
    first = s.ask(chat("text"))
    low, high, high2 = (s.ask(chat("text", priority=p)) for p in (0, 5, 5))
    for client in (first, high, high2, low):
        s.accept()
        s.finish("tokens", client.run)
        assert client.ended is not None


def test_who_leaves_the_queue_makes_room(play):
    s = play(max_live=1, max_queue=1)
    working, leaving = s.ask(chat("text")), s.ask(chat("text"))
    leaving.gone()
    s.turn()
    assert leaving.ended.event.outcome == "cancelled"
    assert s.orchestrator.admission.queued == 0
    staying = s.ask(chat("text"))
    assert not staying.over
    s.accept()
    s.finish("tokens", working.run)
    s.accept()
    s.finish("tokens", staying.run)


# --- deadlines ------------------------------------------------------------------------------------------
def test_the_queue_has_a_deadline(play):
    s = play(max_live=1, queue_s=5.0, first_output_s=0.0)
    working, waiting = s.ask(chat("text")), s.ask(chat("text"))
    s.accept()
    s.pass_time(4.9)
    assert not waiting.over
    s.pass_time(0.3)
    assert waiting.failed.line() == "[deadline_exceeded:queue] nothing for 5.2 s (limit 5 s)"
    s.finish("tokens", working.run)


def test_the_first_output_has_a_deadline_that_names_the_stage(play):
    s = play(first_output_s=10.0)
    client, run = speaking(s)
    s.pass_time(10.5)
    assert client.failed.where == "first output of tokens"
    s.turn()
    assert {n for n, st in s.stages.items() if run in st.stops} == set(ORDER)
    end_all(s, run)


def test_silence_has_a_deadline_that_names_the_stage(play):
    s = play(stall_s=5.0)
    client, run = speaking(s)
    s.stages["tokens"].put(run, 0, TextPiece("a"))
    s.turn()
    s.finish("tokens", run)
    s.pass_time(4.0)
    s.stages["frames"].link.send(msg.ProgressMessage(run, 0))
    s.turn()
    s.pass_time(4.0)
    assert not client.over, "progress is a sign of life"
    s.pass_time(1.5)
    assert client.failed.where == "frames->wave"
    end_all(s, run, "frames", "wave")


def test_silence_of_the_last_stage_names_it_alone(play):
    s = play(stall_s=5.0)
    client, run = speaking(s)
    s.stages["tokens"].put(run, 0, TextPiece("a"))
    s.turn()
    for stage in ("tokens", "frames"):
        s.finish(stage, run)
    s.pass_time(5.5)
    assert client.failed.where == "stall of wave"
    end_all(s, run, "wave")


def test_the_whole_has_a_deadline(play):
    s = play(total_s=20.0)
    client, run = speaking(s)
    for i in range(5):
        s.stages["tokens"].put(run, i, TextPiece("a"))
        s.pass_time(4.5)
    assert client.failed.line() == "[deadline_exceeded:total] not done after 20 s"
    end_all(s, run)


def test_a_requests_own_deadlines_win_and_zero_is_none(play):
    s = play(first_output_s=5.0, total_s=50.0)
    patient = s.ask(chat("text", deadlines=Deadlines(first_output_s=0.0, total_s=0.0)))
    hasty = s.ask(chat("text", deadlines=Deadlines(first_output_s=1.0)))
    for _ in range(2):
        s.accept()
    s.pass_time(1.5)
    assert hasty.failed is not None
    s.pass_time(1_000.0 - STOP_GRACE_S)
    assert not patient.over
    s.finish("tokens", patient.run)
    assert patient.ended is not None


# --- slow readers ------------------------------------------------------------------------------------------
# --- optional outputs ---
OPTIONAL = replace(PIPELINE, outputs=(Output("text", "tokens"), Output("audio", "wave", optional=True)))


def say(s, run, index):
    s.stages["tokens"].put(run, index, TextPiece(f"w{index} "))
    s.turn()


def test_a_stage_that_fails_for_an_optional_output_ends_that_output_alone(play):
    s = play(OPTIONAL)
    client, run = speaking(s)
    say(s, run, 0)
    s.fail("wave", run, StageFailed("boom", "wave"))
    assert not client.over
    assert s.stages["frames"].stops == [run], "nothing needs it any more"
    assert [m.consumer for m in s.stages["tokens"].got if isinstance(m, msg.StopMessage)] == ["frames"]
    s.finish("frames", run, "stopped")
    say(s, run, 1)
    s.finish("tokens", run)
    event = client.ended.event
    assert (event.outcome, event.output, client.text) == ("completed", "text", "w0 w1 ")
    assert event.missing == {"audio": "[stage_failed:wave] boom"}


def test_the_death_of_a_worker_for_an_optional_output_ends_that_output_alone(play):
    s = play(OPTIONAL)
    client, run = speaking(s)
    s.kill("wave")
    s.finish("frames", run, "stopped")
    s.finish("tokens", run)
    assert client.ended.event.outcome == "completed"
    assert "wave" in client.ended.event.missing["audio"]


def test_a_stage_that_cannot_be_opened_for_an_optional_output_is_left_out(play):
    s = play(OPTIONAL)
    client = s.ask(chat("text", "audio"))
    _, _, failed = s.take_call()
    failed(Unavailable("not loaded", "wave"))
    s.turn()
    message = s.accept()
    assert message.upstream == ("tokens",)
    assert s.stages["frames"].stops == [client.run], "its only consumer is not there"
    s.finish("frames", client.run, "stopped")
    assert s.accept().wanted == ("text",)
    assert [m.consumer for m in s.stages["tokens"].got if isinstance(m, msg.StopMessage)] == ["frames"]
    s.finish("tokens", client.run)
    assert client.ended.event.missing == {"audio": "[unavailable:wave] not loaded"}


def test_what_an_optional_stage_may_lose_is_said_to_its_producer(play):
    s = play(OPTIONAL)
    s.ask(chat("text", "audio"))
    opens = [s.accept() for _ in ORDER]
    assert [message.optional for message in opens] == [(), ("wave",), ("frames",)]
    for stage in reversed(ORDER):
        s.finish(stage, opens[0].run)


def test_an_optional_output_that_is_late_is_given_up_after_its_own_deadline(play):
    s = play(OPTIONAL, optional_s=3.0, stall_s=60.0)
    client, run = speaking(s)
    say(s, run, 0)
    s.pass_time(5.0)
    assert not client.over, "the text may take its time"
    s.stages["wave"].put(run, 0, AudioPiece(24_000, 10), audio_tensor(10, 0.0))
    s.finish("tokens", run)
    s.pass_time(2.9)
    assert not client.over
    s.pass_time(0.2)
    assert client.ended.event.outcome == "completed"
    assert client.ended.event.missing["audio"].startswith("[deadline_exceeded:")
    end_all(s, run, "frames", "wave")


def test_a_stall_gives_up_the_optional_outputs_before_the_request(play):
    """The silent stage may be the one that takes no more chunks, so that its producer stands still."""
    s = play(OPTIONAL, stall_s=3.0)
    client, run = speaking(s)
    say(s, run, 0)
    s.pass_time(3.1)
    assert not client.over and s.stages["wave"].stops == [run]
    say(s, run, 1)
    s.pass_time(2.9)
    assert not client.over
    s.pass_time(0.3)
    assert isinstance(client.failed, DeadlineExceeded)
    end_all(s, run)


# --- clients that read slowly ---
PIECE = 40_000 + RESPONSE_BYTES  # what a piece of `speak` is charged


def speak(s, run, index):
    s.stages["wave"].put(run, index, AudioPiece(24_000, 10_000), audio_tensor(10_000, index))
    s.turn()


def leave(s, run, *stages):
    s.orchestrator.requests[run].arrival.responses.gone()
    s.turn()
    end_all(s, run, *stages)


def receipts(client):
    return [event.acknowledge for event in client.events if event.acknowledge]


def acknowledge(s, token):
    return s.ask(GenerateRequest("acknowledge", target=token), "acknowledgment")


def test_a_stream_pauses_until_its_client_has_read_and_loses_nothing(play):
    """A client that has acknowledged nothing is sent an eighth of the bound; each acknowledgment doubles that."""
    s = play(max_output_bytes=24 * PIECE)
    client, run = speaking(s, chat("text", "audio", acknowledge=True))
    for i in range(8):
        speak(s, run, i)
    assert len(client.pieces) == 3
    assert s.stages["wave"].unreleased == 5, "what waits holds its credit: the stage pauses"
    s.finish("wave", run)
    assert acknowledge(s, client.events[0].acknowledge).ended
    s.turn()
    assert len(client.pieces) == 1 + 6
    assert acknowledge(s, receipts(client)[-1]).ended
    s.turn()
    assert [event.index for event in client.events] == list(range(8))
    s.finish("tokens", run)
    s.finish("frames", run)
    assert client.ended.event.outcome == "completed"


def test_a_client_that_acknowledges_nothing_more_ends_by_the_stall_deadline(play):
    s = play(max_output_bytes=24 * PIECE, stall_s=5.0, total_s=0)
    client, run = speaking(s, chat("text", "audio", acknowledge=True))
    for i in range(9):
        speak(s, run, i)
    s.pass_time(4.9)
    assert not client.over, "no stage is waited for: only the client's own time counts"
    acknowledge(s, receipts(client)[0])
    s.pass_time(4.9)
    assert not client.over
    s.pass_time(0.2)
    assert isinstance(client.failed, DeadlineExceeded) and client.failed.where == "client"
    assert len(client.pieces) == 7
    end_all(s, run)


def test_a_piece_larger_than_the_window_passes_alone(play):
    s = play(max_output_bytes=10_000)
    client, run = speaking(s, chat("text", "audio", acknowledge=True))
    speak(s, run, 0)
    speak(s, run, 1)
    assert len(client.pieces) == 1
    acknowledge(s, receipts(client)[0])
    assert len(client.pieces) == 2
    leave(s, run)


def test_an_end_overtakes_nothing_but_is_not_held_up_by_what_was_sent(play):
    s = play(max_output_bytes=10_000)
    client, run = speaking(s, chat("text", "audio", acknowledge=True))
    speak(s, run, 0)
    for stage in ORDER:
        s.finish(stage, run)
    assert client.ended.event.outcome == "completed" and len(client.pieces) == 1


@pytest.mark.parametrize("cause", ["client", "abort", "stage"])
def test_what_waits_for_a_client_is_given_back_when_the_request_ends(play, cause):
    s = play(max_output_bytes=10_000)
    client, run = speaking(s, chat("text", "audio", acknowledge=True))
    for i in range(4):
        speak(s, run, i)
    s.finish("wave", run)
    if cause == "client":
        client.gone()
    elif cause == "abort":
        abort(s, "req")
    else:
        s.fail("tokens", run, StageFailed("lost", "tokens"))
    s.until(lambda: s.stages["wave"].unreleased == 0)
    assert client.over and len(client.pieces) == 1
    end_all(s, run, *(("frames",) if cause == "stage" else ("tokens", "frames")))


@pytest.mark.parametrize("token", ["", "x", "zz:5", ":", "00:x", "00" * 500 + ":1"])
def test_tokens_that_no_response_carried_are_harmless(play, token):
    s = play(max_output_bytes=24 * PIECE)
    client, run = speaking(s, chat("text", "audio", acknowledge=True))
    for i in range(5):
        speak(s, run, i)
    answer = acknowledge(s, token)
    assert answer.over
    seen = receipts(client)[0]
    for forged in (f"{run.hex()}:{10**12}", f"{run.hex()}:", f"{run.hex()}:{'0' * 16}", f"{'00' * 16}:{seen[-16:]}"):
        assert acknowledge(s, forged).ended, "it acknowledges nothing"
    assert len(client.pieces) == 3
    leave(s, run)


def test_a_client_without_acknowledgments_is_sent_audio_as_fast_as_it_plays(play):
    s = play(max_output_bytes=8 * PIECE, stall_s=1.0)
    client, run = speaking(s)
    for i in range(9):
        speak(s, run, i)
    burst = len(client.pieces)
    assert burst == 2 and not receipts(client)
    for _ in range(20):
        s.pass_time(0.1)
    played = 2.0 / (10_000 / 24_000)
    assert not client.over, "the pace is the server's: no deadline counts"
    assert burst + played * 40_000 / PIECE - 2 <= len(client.pieces) <= burst + played
    leave(s, run)


def test_a_silent_stream_says_once_that_it_was_accepted(play):
    s = play()
    client, run = speaking(s)
    s.pass_time(0.9)
    assert client.pieces == []
    s.pass_time(0.2)
    s.pass_time(5.0)
    assert [event.type for event in client.events] == ["accepted"]
    assert client.events[0].request_id == "req"
    leave(s, run)


@pytest.mark.parametrize("more", [{"stream": False}, {"acknowledge": True}])
def test_joined_answers_and_clients_that_triton_watches_get_no_sign_of_life(play, more):
    s = play()
    client, run = speaking(s, chat("text", "audio", **more))
    s.pass_time(5.0)
    assert client.pieces == []
    leave(s, run)


def test_a_stream_whose_output_is_quick_gets_nothing_else(play):
    s = play()
    client, run = speaking(s)
    speak(s, run, 0)
    s.pass_time(5.0)
    assert [event.type for event in client.events] == ["audio"]
    leave(s, run)


def test_a_joined_answer_has_a_bound_of_its_own(play):
    s = play(max_answer_bytes=100_000)
    client, run = speaking(s, chat("text", "audio", stream=False))
    for i in range(3):
        speak(s, run, i)
    assert isinstance(client.failed, BadRequest) and client.failed.where == "stream"
    assert client.failed.message == "the whole answer must be at most 100000 bytes; ask for a stream"
    end_all(s, run)


def test_pieces_sent_after_the_request_is_forgotten_are_given_back(play):
    s = play()
    client, run = speaking(s)
    client.reads = False
    s.stages["wave"].put(run, 0, AudioPiece(24_000, 10_000), audio_tensor(10_000, 1))
    s.turn()
    for stage in ("tokens", "frames", "wave"):
        s.finish(stage, run)
    assert s.orchestrator.requests == {}
    assert s.stages["wave"].unreleased == 1
    client.read()


# --- abort and clients that leave --------------------------------------------------------------------------------
def abort(s, target):
    return s.ask(GenerateRequest("abort", target=target), "abort-id").ended.event


def test_an_abort_needs_the_token_of_the_first_event_or_the_operators_key(play):
    """Anybody who reached Triton's port could list the ids of all requests and end them."""
    s = play()
    client, run = speaking(s)
    for index in range(2):
        s.stages["tokens"].put(run, index, TextPiece("a"))
    s.turn()
    token, later = (event.token for event in client.events)
    assert len(token) == 16 and later == ""
    stranger = s.ask(GenerateRequest("abort", target="req"), "abort-id", is_operator=False)
    assert (stranger.failed.code, stranger.failed.where) == ("bad_request", "token")
    guess = s.ask(GenerateRequest("abort", target="req", token="0" * 16), "abort-id", is_operator=False)
    assert guess.ended.event.aborted == 0 and not client.over
    listing = s.ask(GenerateRequest("requests"), is_operator=False)
    assert (listing.failed.code, listing.failed.where) == ("bad_request", "operator_key")
    own = s.ask(GenerateRequest("abort", target="req", token=token), "abort-id", is_operator=False)
    assert own.ended.event.aborted == 1 and client.ended.event.finish_reason == "abort"
    end_all(s, run)


def test_abort_by_id_ends_all_of_that_id_once(play):
    s = play()
    clients = [s.ask(chat("text"), "same") for _ in range(3)]
    other = s.ask(chat("text"), "same2")
    for _ in range(4):
        s.accept()
    assert abort(s, "same").aborted == 3
    for client in clients:
        end = client.ended.event
        assert (end.outcome, end.finish_reason, end.output, end.stage) == ("cancelled", "abort", "text", "tokens")
    assert abort(s, "same").aborted == 0, "again: nothing to end"
    assert abort(s, "unknown").aborted == 0
    assert s.ask(GenerateRequest("abort"), "abort-id").failed.where == "target"
    assert not other.over
    for client in clients:
        s.finish("tokens", client.run, "stopped")
    s.finish("tokens", other.run)
    assert s.orchestrator.metrics.requests.values["cancelled",] == 3


def test_an_abort_reports_what_was_delivered(play):
    s = play()
    client, run = speaking(s)
    s.stages["tokens"].put(run, 0, TextPiece("ab", (5, 6)))
    s.stages["wave"].put(run, 0, AudioPiece(24_000, 20_000), audio_tensor(20_000, 1))
    s.turn()
    s.stages["tokens"].link.send(msg.FinishedMessage(run, "stop", {"prompt_tokens": 3, "completion_tokens": 2}))
    s.stages["wave"].put(run, 1, AudioPiece(24_000, 500), audio_tensor(500, 1))
    s.turn()
    abort(s, "req")
    assert client.ended.event.usage == {"prompt_tokens": 3, "completion_tokens": 2, "audio_samples": 20_500}
    assert client.ended.event.index == 3
    end_all(s, run)


def test_an_abort_before_a_stage_has_ended_reports_the_prompt_as_well(play):
    """The engine counts a prompt at its end; an answer that is cut short has none."""
    s = play()
    client, run = speaking(s)
    s.stages["tokens"].put(run, 0, TextPiece("ab", (5, 6), prompt_tokens=7))
    s.stages["tokens"].put(run, 1, TextPiece("c", (7,)))
    s.turn()
    abort(s, "req")
    assert client.ended.event.usage == {"prompt_tokens": 7, "completion_tokens": 3}
    end_all(s, run)


def test_what_comes_after_an_abort_is_given_back_and_not_sent(play):
    s = play()
    client, run = speaking(s)
    s.stages["tokens"].put(run, 0, TextPiece("a"))
    s.turn()
    abort(s, "req")
    s.stages["tokens"].put(run, 1, TextPiece("b"))
    s.stages["wave"].put(run, 0, AudioPiece(24_000, 20_000), audio_tensor(20_000, 1))
    s.stages["tokens"].link.send(msg.ProgressMessage(run, 0))
    s.turn()
    assert client.text == "a"
    assert (client.ended.event.output, client.ended.event.stage) == ("audio", "wave")
    end_all(s, run)


@pytest.mark.parametrize("accepted", range(4))
@pytest.mark.parametrize("answered", [True, False])
def test_a_client_that_leaves_in_any_phase(play, accepted, answered):
    """Before, between and after the opens; also while BLS has not answered yet."""
    s = play()
    client = s.ask(chat("text", "audio"))
    run = client.run
    calls = []
    for _ in range(accepted):
        message, opened, _ = s.take_call()
        stage = s.stage_of(message)
        stage.reply(message.reply, msg.AcceptedMessage(run, stage.hub.address))
        s.turn()
        if answered:
            s.answer(opened)
        else:
            calls.append(opened)
    client.gone()
    client.gone()
    s.turn()
    assert client.ended.event.outcome == "cancelled"
    for _ in range(accepted, 3):  # those that are being opened are stopped as soon as they are accepted
        message, opened, _ = s.take_call()
        stage = s.stage_of(message)
        stage.reply(message.reply, msg.AcceptedMessage(run, stage.hub.address))
        s.answer(opened)
    s.turn()
    stopped = [name for name, st in s.stages.items() if st.stops == [run]]
    assert sorted(stopped) == sorted(ORDER)
    end_all(s, run, *stopped)
    for opened in calls:
        assert run in s.orchestrator.requests, "a request lives until its handles are disposed of"
        s.answer(opened)


# --- failures ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("failing", range(3))
def test_an_open_that_fails_stops_the_others(play, failing):
    s = play()
    client = s.ask(chat("text", "audio"))
    for _ in range(failing):
        s.accept()
    _, _, failed = s.take_call()
    failed(Unavailable("the stage is restarting", ORDER[failing]))
    s.turn()
    assert client.failed.line() == f"[unavailable:{ORDER[failing]}] the stage is restarting"
    while s.opener.calls:  # those that were being opened meanwhile
        s.accept()
    for name in {*ORDER} - {ORDER[failing]}:
        assert s.stages[name].stops == [client.run]
        s.finish(name, client.run, "stopped")


@pytest.mark.parametrize("may_refuse", [False, True])
def test_output_waits_for_a_stub_alone_where_its_stage_can_refuse_nothing(play, may_refuse):
    """Acceptance takes a step of the stage's engine; a request without options for the stage does not wait for that."""
    s = play()
    client = s.ask(chat("text", "audio", stages={"wave": {"delay_s": 0.0}} if may_refuse else {}))
    for message, opened, _ in [s.take_call() for _ in ORDER]:
        stage = s.stages["wave"] if message.wanted == ("audio",) else s.stage_of(message)
        answer = msg.ReceivedMessage(message.run) if stage is s.stages["wave"] else None
        stage.reply(message.reply, answer or msg.AcceptedMessage(message.run, stage.hub.address))
        s.answer(opened)
    s.stages["tokens"].put(client.run, 0, TextPiece("a"))
    s.turn()
    assert client.text == ("" if may_refuse else "a")
    s.stages["wave"].link.send(msg.AcceptedMessage(client.run, s.stages["wave"].hub.address))
    s.turn()
    assert client.text == "a"
    for stage in reversed(ORDER):
        s.finish(stage, client.run)


@pytest.mark.parametrize("end", ["accepts", "fails"])
def test_text_does_not_wait_for_the_opening_of_a_stage_that_was_ready(play, end):
    """Sixteen requests at once would wait for all openings of all of them."""
    s = play()
    s.states["frames"] = StageStatus(state="ready", instances=1, ready=1)
    client = s.ask(chat("text", "audio"))
    calls = {message.wanted or message.consumers: (message, *rest) for message, *rest in (s.take_call() for _ in ORDER)}
    for key in (("text",), ("audio",)):
        message, opened, _ = calls[key]
        s.stage_of(message).reply(message.reply, msg.AcceptedMessage(client.run, s.stage_of(message).hub.address))
        s.answer(opened)
    s.stages["tokens"].put(client.run, 0, TextPiece("a"))
    s.turn()
    assert client.text == "a"
    message, opened, failed = calls["wave",]
    if end == "fails":
        failed(Unavailable("gone", "frames"))
        s.turn()
        assert client.failed.line() == "[unavailable:frames] gone"
        end_all(s, client.run, "tokens", "wave")
        return
    s.stage_of(message).reply(message.reply, msg.AcceptedMessage(client.run, s.stage_of(message).hub.address))
    s.answer(opened)
    end_all(s, client.run)


@pytest.mark.parametrize("last", ["refuses", "accepts", "dies"])
def test_no_output_leaves_before_the_last_stage_that_is_needed_has_accepted(play, last):
    """What a stage refuses must reach the client as the one answer, not behind half a text."""
    s = play()
    client = s.ask(chat("text", "audio"))
    calls = {message.wanted or message.consumers: (message, *rest) for message, *rest in (s.take_call() for _ in ORDER)}
    run = client.run
    for key in (("text",), ("audio",)):
        message, opened, _ = calls[key]
        s.stage_of(message).reply(message.reply, msg.AcceptedMessage(run, s.stage_of(message).hub.address))
        s.answer(opened)
    s.stages["tokens"].put(run, 0, TextPiece("a"))
    s.stages["tokens"].put(run, 1, TextPiece("b"))
    s.turn()
    s.finish("tokens", run)
    assert client.text == "" and not client.over
    assert s.stages["tokens"].unreleased == 2
    s.pass_time(s.orchestrator.deploy.stall_s * 0.9)
    message, opened, failed = calls["wave",]
    if last == "accepts":
        s.stage_of(message).reply(message.reply, msg.AcceptedMessage(run, s.stages["frames"].hub.address))
        s.answer(opened)
        assert [client.text, client.ended] == ["ab", None]
        s.finish("frames", run)
        s.finish("wave", run)
        assert client.ended.event.outcome == "completed"
        return
    if last == "refuses":
        failed(BadRequest("no such voice", "speech.voice"))
    else:
        s.kill("wave")
        failed(Unavailable("gone", "frames"))
    s.turn()
    assert client.text == "" and client.failed is not None
    if last == "refuses":
        assert client.failed.where == "speech.voice"
        s.finish("wave", run, "stopped")


@pytest.mark.parametrize("failing", ORDER)
def test_a_stage_that_fails_ends_the_request_with_its_name(play, failing):
    s = play()
    client, run = speaking(s)
    s.fail(failing, run, StageFailed("boom"))
    assert client.failed.line() == f"[stage_failed:{failing}] boom"
    others = [name for name in ORDER if name != failing]
    for name in others:  # consumers report the same trouble; only the first counts
        s.fail(name, run, StageFailed("boom", failing))


def test_a_run_refused_over_the_link_before_bls_answers(play):
    """The worker says Failed, the stub ends its stream without outputs: the handle comes last."""
    s = play()
    client = s.ask(chat("text"))
    message, opened, _ = s.take_call()
    stage = s.stages["tokens"]
    stage.reply(message.reply, msg.FailedMessage(message.run, msg.ErrorInfo("bad_request", "no", "stages.tokens.x")))
    s.turn()
    assert client.failed.where == "stages.tokens.x"
    assert client.run in s.orchestrator.requests
    handle = s.answer(opened)
    assert s.opener.closed == [handle]


def test_a_run_refused_over_the_link_and_by_bls(play):
    s = play()
    client = s.ask(chat("text"))
    message, _, failed = s.take_call()
    s.stages["tokens"].reply(
        message.reply, msg.FailedMessage(message.run, msg.ErrorInfo("stage_failed", "no", "tokens"))
    )
    s.turn()
    failed(Unavailable("gone", "tokens"))
    s.turn()
    assert client.failed.code == "stage_failed"


@pytest.mark.parametrize("dead", ORDER)
def test_a_worker_that_dies_fails_its_requests_at_once_and_its_handle_is_buried(play, dead):
    s = play()
    client, run = speaking(s)
    handle = s.opener.handles[ORDER.index(dead)]
    s.kill(dead)
    s.turn()
    assert client.failed.line() == f"[stage_failed:{dead}] the stage's worker died"
    assert s.opener.abandoned == [handle]
    assert s.orchestrator.metrics.runs.values[dead, "lost"] == 1
    for name in ORDER:
        if name != dead:
            s.finish(name, run, "stopped")


def test_the_death_of_one_instance_leaves_requests_of_another_alone(play, tmp_path):
    s = play()
    first = s.ask(chat("text"))
    s.accept()
    old = s.stages["tokens"]
    s.stages["tokens"] = ScriptedStage(tmp_path, PIPELINE, "tokens", 1)
    second = s.ask(chat("text"))
    s.accept()
    old.hub.close()
    s.turn()
    assert first.failed.where == "tokens"
    assert not second.over
    s.finish("tokens", second.run)
    assert second.ended is not None


def test_a_worker_that_dies_before_bls_has_answered(play):
    s = play()
    client = s.ask(chat("text"))
    s.accept(opener_answers=False)
    call = s.orchestrator.requests[client.run]
    s.kill("tokens")
    assert client.failed.where == "tokens"
    assert call.runs["tokens"].handle_state is HandleState.ABANDON_LATER
    s.pass_time(STOP_GRACE_S + 0.5)


def test_a_death_that_the_stub_tells_before_bls_has_answered_leaves_nothing_buried(opening):
    s, client, accept = opening
    run = s.orchestrator.requests[client.run].runs["tokens"]
    handle, run.handle, run.handle_state = run.handle, None, HandleState.OPENING  # BLS has not answered
    accept()
    s.kill("tokens")
    s.fail("stub", client.run, StageFailed("the stage's worker died", "tokens"))
    assert client.failed.where == "tokens"
    s.orchestrator._on_opened(client.run, "tokens", handle)
    assert (s.opener.closed, s.opener.abandoned) == ([handle], [])


# --- stages that do not answer -----------------------------------------------------------------------------------
def test_a_run_that_does_not_stop_is_given_up(play):
    s = play()
    client, run = speaking(s)
    abort(s, "req")
    s.finish("tokens", run, "stopped")
    s.pass_time(STOP_GRACE_S - 0.5)
    assert run in s.orchestrator.requests
    s.pass_time(1.0)
    assert s.orchestrator.requests == {}
    assert len(s.opener.abandoned) == 2
    assert client.ended.event.outcome == "cancelled"
    s.finish("wave", run, "stopped")  # too late for the client, but its stream has ended
    assert len(s.opener.abandoned) == 1


def test_an_open_that_is_answered_after_it_was_given_up(play):
    """An abandoned run is stopped when it is accepted, and its handle is abandoned."""
    s = play()
    client = s.ask(chat("text"))
    message, opened, _ = s.take_call()
    client.gone()
    s.turn()
    s.pass_time(STOP_GRACE_S + 0.5)
    assert s.orchestrator.requests == {}
    stage = s.stages["tokens"]
    stage.reply(message.reply, msg.AcceptedMessage(message.run, stage.hub.address))
    handle = s.answer(opened)
    s.turn()
    assert s.opener.abandoned == [handle]
    assert stage.stops == [message.run], "else it would run to its natural end, unread"


def test_outputs_of_unknown_runs_are_given_back(play):
    s = play()
    client, run = speaking(s)
    for stage in ("tokens", "frames", "wave"):
        s.finish(stage, run)
    s.stages["wave"].put(run, 0, AudioPiece(24_000, 10_000), audio_tensor(10_000, 1))
    s.stages["wave"].link.send(msg.FinishedMessage(run, "stop"))
    s.stages["wave"].link.send(msg.StopMessage(run))  # nonsense
    s.turn()
    assert client.ended is not None


# --- health ------------------------------------------------------------------------------------------
def test_health_tells_the_truth(play):
    s = play(max_live=1)
    client = s.ask(chat("text"))
    s.accept()
    waiting = s.ask(chat("text"))
    event = s.ask(GenerateRequest("health"), "h").ended.event
    assert (event.type, event.request_id) == ("health", "h")
    status = event.status
    assert status.ready
    assert status.pipeline == "toy"
    assert (status.live, status.queued) == (1, 1)
    assert {name: stage.live for name, stage in status.stages.items()} == {"tokens": 1, "frames": 0, "wave": 0}
    assert status.operations == ("chat", "speech", "completion")
    assert status.params == ("speech.voice", "speech.language", "speech.speed")
    s.states["wave"] = StageStatus(state="restarting")
    assert not s.health().ready
    del s.states["wave"]
    missing = s.health()
    assert not missing.ready
    assert missing.stages["wave"].state == "missing"
    s.finish("tokens", client.run)
    s.accept()
    s.finish("tokens", waiting.run)


def test_a_ping_is_answered(play):
    s = play()
    stage = s.stages["tokens"]
    stage.reply(s.hub.address, msg.PingMessage())
    s.turn()
    assert msg.PingMessage("toy/", "ready", 0) in stage.got


def test_media_go_to_the_stages_that_take_them(play):
    tokens, *others = PIPELINE.stages
    listens = replace(tokens, inputs=(TensorSpec("audio", "float32", (-1,)),))
    s = play(replace(PIPELINE, stages=(listens, *others), check=lambda request: None))
    part = Part("audio", length=5, sample_rate=16_000)
    s.ask(GenerateRequest(messages=(Message("user", (part,)),), modalities=("text",)), audio=5)
    s.until(lambda: s.opener.calls)
    call = s.opener.calls[0][0]
    assert list(call.inputs) == ["audio"]
    assert call.model == "toy_tokens"
    message, _, failed = s.take_call()
    assert message.has_inputs
    failed(Unavailable("x", "tokens"))
    s.turn()


def test_a_posted_thing_that_is_none_is_our_own_mistake(play):
    s = play()
    s.hub.post("nonsense")
    with pytest.raises(TypeError):
        s.turn()


# --- the stub speaks for a run until its worker does -----------------------------------------------------------
@pytest.fixture
def opening(play, tmp_path):
    """A chat whose run waits in its stub for the worker; (scene, client, the worker's acceptance)."""
    s = play()
    client = s.ask(chat("text"))
    message, opened, _ = s.take_call()
    stub = s.stages["stub"] = ScriptedStage(tmp_path, PIPELINE, "tokens", 1)
    stub.reply(message.reply, msg.ReceivedMessage(message.run))
    s.answer(opened)
    accepted = msg.AcceptedMessage(message.run, s.stages["tokens"].hub.address)
    return s, client, lambda: (s.stages["tokens"].reply(message.reply, accepted), s.turn())


def test_a_run_that_no_worker_took_ends_by_its_stubs_word(opening):
    s, client, _ = opening
    s.fail("stub", client.run, StageFailed("the stage's worker died", "tokens"))
    assert client.failed.line() == "[stage_failed:tokens] the stage's worker died"
    assert s.opener.closed == s.opener.handles, "its FINAL was sent before"


def test_a_run_that_no_worker_took_ends_with_its_stub(opening):
    s, client, _ = opening
    s.kill("stub")
    assert client.failed.line() == "[stage_failed:tokens] the stage's stub died"
    assert s.opener.abandoned == s.opener.handles, "its FINAL will never come"


def test_an_accepted_run_outlives_its_stubs_link(opening):
    s, client, accept = opening
    accept()
    s.kill("stub")
    s.finish("tokens", client.run, "stop")
    assert client.ended is not None


@pytest.mark.parametrize("first", ["stub", "worker"])
def test_a_death_that_stub_and_worker_both_tell_is_one_end(opening, first):
    s, client, accept = opening
    accept()
    error = StageFailed("the stage's worker died", "tokens")
    by_stub = lambda: s.fail("stub", client.run, error, worker_died=True)  # noqa: E731
    by_worker = lambda: s.kill("tokens")  # noqa: E731
    for tell in (by_stub, by_worker) if first == "stub" else (by_worker, by_stub):
        tell()
    assert client.failed.line() == "[stage_failed:tokens] the stage's worker died"
    assert s.opener.closed == s.opener.handles, "the stub has closed the stream before it reported the end"
    assert s.orchestrator.metrics.runs.values["tokens", "lost"] == 1


def test_a_worker_that_ends_with_its_stub_died_of_the_stub(opening):
    s, client, accept = opening
    accept()
    s.kill("stub")
    s.kill("tokens")
    assert client.failed.line() == "[stage_failed:tokens] the stage's stub died"
    assert s.orchestrator.metrics.runs.values["tokens", "lost"] == 1


def test_a_stubs_report_after_its_workers_changes_nothing(play, tmp_path):
    s = play()
    client = s.ask(chat("text"))
    message = s.accept()
    s.stages["stub"] = ScriptedStage(tmp_path, PIPELINE, "tokens", 1)
    s.stages["stub"].reply(message.reply, msg.ReceivedMessage(message.run))
    s.turn()
    s.kill("stub")
    s.finish("tokens", client.run, "stop")
    assert client.ended is not None


def test_when_nothing_can_be_opened_any_more_those_who_wait_for_it_fail_and_the_others_go_on(play):
    s = play()
    open_run = s.ask(chat("text"))
    s.accept()
    waiting = s.ask(chat("text"))
    message, opened, _ = s.take_call()
    assert s.health().ready
    s.opener.stuck = True
    s.pass_time(1.0)
    assert waiting.failed.line() == "[unavailable:tokens] Triton is not accepting new BLS requests"
    assert s.orchestrator.state == "stuck"
    assert not s.health().ready
    s.finish("tokens", open_run.run)
    assert open_run.ended is not None
    s.answer(opened)  # it came back after all
    s.stages["tokens"].reply(message.reply, msg.AcceptedMessage(message.run, s.stages["tokens"].hub.address))
    s.turn()
    assert s.stages["tokens"].stops == [message.run]
    assert s.opener.abandoned == s.opener.handles[-1:]


def test_an_open_that_was_failed_is_put_away_also_while_its_request_still_ends(play):
    s = play()
    client = s.ask(chat("text", "audio"))
    s.accept()
    message, opened, _ = s.take_call()
    s.opener.stuck = True
    s.pass_time(1.0)
    assert client.failed.line() == "[unavailable:frames] Triton is not accepting new BLS requests"
    s.opener.stuck = False
    handle = s.answer(opened)  # it came back, and the first stage has not stopped yet
    s.stages["frames"].reply(message.reply, msg.AcceptedMessage(message.run, s.stages["frames"].hub.address))
    s.turn()
    assert s.stages["frames"].stops == [message.run], "else it would run to its natural end, unread"
    assert s.opener.abandoned == [handle]
    s.finish("wave", client.run, "stopped")
    assert s.orchestrator.requests == {}


# --- several instances, gauges -----------------------------------------------------------------------------------
def test_a_run_that_an_instance_refuses_is_offered_to_another(play):
    """A dead instance of two kept getting half of the requests, and each of them failed."""
    s = play()
    s.states["tokens"] = StageStatus(state="ready", instances=2, ready=1)
    client = s.ask(chat("text"))
    _, _, failed = s.take_call()
    failed(Unavailable("the stage is restarting", "tokens"))
    s.turn()
    assert not client.over
    s.accept()
    s.finish("tokens", client.run)
    assert client.ended.event.outcome == "completed"
    assert s.orchestrator.metrics.opened.values["tokens",] == 1


@pytest.mark.parametrize(("instances", "ready", "refusals"), [(2, 2, 3), (2, 0, 1), (1, 1, 1)])
def test_a_refused_run_fails_where_no_other_instance_takes_it(play, instances, ready, refusals):
    s = play()
    s.states["tokens"] = StageStatus(state="ready", instances=instances, ready=ready)
    client = s.ask(chat("text"))
    for _ in range(refusals):
        assert not client.over
        _, _, failed = s.take_call()
        failed(Unavailable("the stage is restarting", "tokens"))
        s.turn()
    assert client.failed.line() == "[unavailable:tokens] the stage is restarting"
    assert s.opener.calls == [] and s.orchestrator.requests == {}


def test_health_says_what_can_be_made_where_an_instance_is_missing(play):
    s = play()

    def health(**states):
        s.states.update(states)
        return s.ask(GenerateRequest("health")).ended.event.status

    ready, dead = StageStatus(state="ready", instances=1, ready=1), StageStatus(state="restarting", instances=1)
    status = health(**dict.fromkeys(ORDER, ready))
    assert (status.state, status.ready, set(status.outputs)) == ("ready", True, {"text", "audio"})
    status = health(wave=StageStatus(state="ready", instances=2, ready=1))
    assert (status.state, status.ready, set(status.outputs)) == ("degraded", True, {"text", "audio"})
    status = health(wave=dead)
    assert (status.state, status.ready, status.outputs) == ("degraded", False, ("text",))
    status = health(tokens=dead, frames=dead)
    assert (status.state, status.ready, status.outputs) == ("unavailable", False, ())


def test_gauges_are_updated_while_a_request_is_open(play):
    """They read 0 while 64 requests hung and 16 waited."""
    s = play()
    client = s.ask(chat("text"))
    before = client.published
    s.pass_time(PUBLISH_S + 0.1)
    assert client.published == before + 1
    s.accept()
    s.finish("tokens", client.run)
    s.pass_time(10 * PUBLISH_S)
    assert client.published == before + 1, "without a request Triton may be unloading the model"


# --- pools -------------------------------------------------------------------------------------------------------
POOLS = {"workers": {"tokens": 2, "frames": 2, "wave": 2}}


def replace_worker(s, stage):
    """Kill the stage's worker; another one takes what comes next."""
    s.stages.pop(stage).hub.close()
    s.stages[stage] = ScriptedStage(s.folder, s.pipeline, stage, number=1)
    s.turn()


@pytest.mark.parametrize("dead", ORDER)
def test_a_request_without_output_begins_again_where_a_worker_of_a_pool_dies(play, dead):
    s = play(**POOLS)
    client, first = speaking(s)
    replace_worker(s, dead)
    assert not client.over
    opened = [s.accept() for _ in ORDER]
    (second,) = {m.run for m in opened}
    assert second != first, "nothing late of the first attempt can be mistaken"
    alive = [stage for stage in ORDER if stage != dead]
    assert [s.stages[stage].stops for stage in alive] == [[first]] * 2
    end_all(s, first, *alive)
    s.stages["tokens"].put(second, 0, TextPiece("hello"))
    s.turn()
    end_all_well(s, second)
    assert client.text == "hello"
    assert (client.ended.event.outcome, client.failed) == ("completed", None)
    assert s.orchestrator.metrics.retries.values[dead,] == 1


def accept_again(s):
    """All stages take the second attempt; its run."""
    (run,) = {s.accept().run for _ in ORDER}
    return run


def end_all_well(s, run):
    for stage in reversed(ORDER):
        s.finish(stage, run)


def test_a_request_with_output_ends_with_one_error(play):
    s = play(**POOLS)
    client, run = speaking(s)
    s.stages["tokens"].put(run, 0, TextPiece("hello"))
    s.turn()
    replace_worker(s, "wave")
    assert client.failed.line() == "[stage_failed:wave] the stage's worker died"
    end_all(s, run, "tokens", "frames")
    assert s.opener.calls == []


def test_one_joined_answer_begins_again_at_any_time_and_holds_nothing_twice(play):
    s = play(**POOLS)
    client, first = speaking(s, chat("text", "audio", stream=False))
    s.stages["tokens"].put(first, 0, TextPiece("hello"))
    s.turn()
    replace_worker(s, "wave")
    second = accept_again(s)
    end_all(s, first, "tokens", "frames")
    s.stages["tokens"].put(second, 0, TextPiece("hello"))
    s.turn()
    end_all_well(s, second)
    assert text_of(client.ended.event) == "hello"


def test_a_request_that_loses_a_second_worker_fails_once(play):
    s = play(**POOLS)
    client, first = speaking(s)
    replace_worker(s, "frames")
    second = accept_again(s)
    end_all(s, first, "tokens", "wave")
    s.kill("frames")
    assert client.failed.line() == "[stage_failed:frames] the stage's worker died"
    end_all(s, second, "tokens", "wave")


def test_an_error_of_the_engine_is_no_reason_to_begin_again(play):
    s = play(**POOLS)
    client, run = speaking(s)
    s.fail("wave", run, StageFailed("boom", "wave"))
    assert client.failed.line() == "[stage_failed:wave] boom"
    end_all(s, run, "tokens", "frames")
    assert s.opener.calls == []


def test_a_stage_of_one_worker_fails_at_once(play):
    s = play(workers={"frames": 2})
    client, run = speaking(s)
    replace_worker(s, "wave")
    assert client.failed.line() == "[stage_failed:wave] the stage's worker died"
    end_all(s, run, "tokens", "frames")


def test_a_consumer_that_tells_of_the_death_first_is_believed(play):
    """Its word may overtake the loss of the dead worker's own link."""
    s = play(**POOLS)
    client, first = speaking(s)
    s.fail("wave", first, WorkerDied("frames"))
    second = accept_again(s)
    assert second != first
    end_all(s, first, "tokens", "frames")
    end_all_well(s, second)
    assert client.ended.event.outcome == "completed"


def test_a_stage_that_is_still_opening_is_left_behind(play):
    s = play(**POOLS)
    client = s.ask(chat("text", "audio"))
    first = s.accept().run
    message, opened, _ = s.take_call()
    assert message.wait_s == 60.0, "it may wait in the stub as long as in the queue"
    s.accept()
    replace_worker(s, "tokens")
    frames = s.stages["frames"]
    frames.reply(message.reply, msg.AcceptedMessage(message.run, frames.hub.address))
    s.turn()
    s.answer(opened)
    assert frames.stops == [first], "it was accepted for the first attempt"
    end_all(s, first, "frames", "wave")
    second = accept_again(s)
    end_all_well(s, second)
    assert client.ended.event.outcome == "completed"


def test_a_client_that_leaves_after_the_restart_stops_the_second_attempt(play):
    s = play(**POOLS)
    client, first = speaking(s)
    replace_worker(s, "wave")
    second = accept_again(s)
    end_all(s, first, "tokens", "frames")
    client.gone()
    s.turn()
    assert client.over
    end_all(s, second)


def test_the_second_attempt_keeps_place_deadlines_and_token(play):
    s = play(**POOLS, max_live=1)
    client, first = speaking(s)
    old = s.orchestrator.requests[first]
    waiting = s.ask(chat("text"), "next")
    replace_worker(s, "wave")
    new = s.orchestrator.requests[client.run]
    assert (new.arrived_s, new.admitted_s, new.token) == (old.arrived_s, old.admitted_s, old.token)
    assert s.orchestrator.admission.live == {new}, "the next one still waits"
    for _ in ORDER:
        s.accept()
    end_all(s, first, "tokens", "frames")
    end_all_well(s, new.run)
    s.accept()
    s.finish("tokens", waiting.run)
    assert waiting.ended is not None
