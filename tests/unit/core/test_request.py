# SPDX-License-Identifier: Apache-2.0
"""The request machine: its table, single lives, and 20,000 random ones."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from triton_omni.backends.core import request as life
from triton_omni.backends.core.errors import Cancelled, DeadlineExceeded, StageFailed, Unavailable
from triton_omni.backends.core.pipeline import Edge, Operation, Output, Pipeline, Stage
from triton_omni.backends.core.request import (
    STOPPED,
    CloseRun,
    ConnectConsumer,
    DropConsumer,
    EmitOutput,
    EndRequest,
    ForgetRequest,
    OpenFailed,
    OpenRun,
    Outcome,
    OutputArrived,
    ReleaseOutput,
    RequestAdmitted,
    RequestExpired,
    RequestMachine,
    RunAccepted,
    RunFailed,
    RunFinished,
    RunState,
    StopRun,
)


def _no_engine(context):
    raise NotImplementedError


CHAIN = Pipeline(
    "chain",
    tuple(Stage(name, _no_engine) for name in ("thinker", "talker", "voice")),
    (Edge("thinker", "talker"), Edge("talker", "voice")),
    (Output("text", "thinker"), Output("audio", "voice")),
    (Operation("chat", "thinker", ("text",)), Operation("speech", "talker", ("audio",))),
)
SPEAKS = ("thinker", "talker", "voice")
OOPS = StageFailed("oops", "talker")


def request(wanted=("text", "audio"), needed=SPEAKS, pipeline=CHAIN):
    return RequestMachine(pipeline, frozenset(wanted), frozenset(needed))


def after(*events, wanted=("text", "audio"), needed=SPEAKS):
    """A request that has seen `events`."""
    machine = request(wanted, needed)
    for event in events:
        machine.on(event)
    return machine


OPENED = (RequestAdmitted(), RunAccepted("voice"), RunAccepted("talker"), RunAccepted("thinker"))


# --- the table: each event in each state of a run ------------------------------------------------------------------
STATES = {
    RunState.IDLE: (),
    RunState.OPENING: (RequestAdmitted(), RunAccepted("voice")),
    RunState.RUNNING: OPENED,
    RunState.CLOSED: (*OPENED, RunFinished("talker", "stop", {})),
}
END = EndRequest(Outcome.FAILED, "audio", "voice", "error", {}, OOPS)
EARLY = EndRequest(Outcome.FAILED, "audio", "voice", "error", {}, StageFailed("ended before it was accepted", "talker"))
IGNORED: list[object] = []
TABLE = {
    (RunState.IDLE, RunAccepted): IGNORED,
    (RunState.IDLE, RunFinished): IGNORED,
    (RunState.IDLE, RunFailed): IGNORED,
    (RunState.IDLE, OpenFailed): IGNORED,
    (RunState.OPENING, RunAccepted): [ConnectConsumer("talker", "voice")],
    (RunState.OPENING, RunFinished): [CloseRun("talker"), StopRun("voice"), EARLY],
    (RunState.OPENING, RunFailed): [CloseRun("talker"), StopRun("voice"), END],
    (RunState.OPENING, OpenFailed): [CloseRun("talker"), StopRun("voice"), END],
    (RunState.RUNNING, RunAccepted): IGNORED,
    (RunState.RUNNING, RunFinished): [CloseRun("talker")],
    (RunState.RUNNING, RunFailed): [CloseRun("talker"), StopRun("voice"), StopRun("thinker"), END],
    (RunState.RUNNING, OpenFailed): [CloseRun("talker"), StopRun("voice"), StopRun("thinker"), END],
    (RunState.CLOSED, RunAccepted): IGNORED,
    (RunState.CLOSED, RunFinished): IGNORED,
    (RunState.CLOSED, RunFailed): IGNORED,
    (RunState.CLOSED, OpenFailed): IGNORED,
}
EVENTS = {
    RunAccepted: RunAccepted("talker"),
    RunFinished: RunFinished("talker", "stop", {}),
    RunFailed: RunFailed("talker", OOPS),
    OpenFailed: OpenFailed("talker", OOPS),
}


def plain(actions):
    """Actions with their error as text: errors are equal only to themselves."""
    return [
        (a.outcome, a.output, a.stage, a.finish_reason, a.usage, a.error.line())
        if isinstance(a, EndRequest) and a.error
        else a
        for a in actions
    ]


@pytest.mark.parametrize(("state", "event"), TABLE, ids=lambda x: x.name if isinstance(x, RunState) else x.__name__)
def test_table(state, event):
    machine = after(*STATES[state])
    assert machine.runs["talker"] is state
    assert plain(machine.on(EVENTS[event])) == plain(TABLE[state, event])


@pytest.mark.parametrize("event", [life.RequestCancelled("abort"), RequestExpired(DeadlineExceeded("late", "queue"))])
def test_a_request_that_never_started_ends_and_is_done(event):
    machine = request()
    [end, done] = machine.on(event)
    assert (end.output, end.stage) == ("audio", "voice")
    assert done == ForgetRequest()
    for more in (RequestAdmitted(), *OPENED, event, OutputArrived("text", 1)):
        assert [a for a in machine.on(more) if not isinstance(a, ReleaseOutput)] == []


# --- single lives --------------------------------------------------------------------------------------------------
def test_a_whole_life():
    machine = request()
    assert machine.on(RequestAdmitted()) == [OpenRun("thinker"), OpenRun("talker"), OpenRun("voice")]
    assert machine.on(RunAccepted("thinker")) == []
    assert machine.on(RunAccepted("voice")) == []
    assert machine.on(RunAccepted("talker")) == [
        ConnectConsumer("thinker", "talker"), ConnectConsumer("talker", "voice")]  # fmt: skip
    assert machine.on(OutputArrived("text", "a")) == [EmitOutput("text", 0, "a")]
    assert machine.on(OutputArrived("audio", "b")) == [EmitOutput("audio", 0, "b")]
    assert machine.on(OutputArrived("text", "c")) == [EmitOutput("text", 1, "c")]
    assert machine.on(RunFinished("thinker", "length", {"tokens": 2})) == [CloseRun("thinker")]
    assert machine.on(RunFinished("talker", "stop", {"tokens": 3})) == [CloseRun("talker")]
    assert machine.on(OutputArrived("audio", "d")) == [EmitOutput("audio", 1, "d")]
    assert machine.on(RunFinished("voice", "stop", {"samples": 9})) == [
        CloseRun("voice"),
        EndRequest(Outcome.COMPLETED, "audio", "voice", "length", {"tokens": 5, "samples": 9}),
        ForgetRequest(),
    ]


def test_text_alone_never_opens_a_speech_stage():
    machine = request(["text"], ["thinker"])
    assert machine.on(RequestAdmitted()) == [OpenRun("thinker")]
    assert machine.on(RunAccepted("thinker")) == []
    assert machine.on(RunFinished("thinker", "stop", {})) == [
        CloseRun("thinker"), EndRequest(Outcome.COMPLETED, "text", "thinker", "stop", {}), ForgetRequest()]  # fmt: skip


def test_an_unwanted_output_is_released():
    machine = after(RequestAdmitted(), RunAccepted("thinker"), wanted=["text"], needed=["thinker"])
    assert machine.on(OutputArrived("audio", "x")) == [ReleaseOutput("x")]
    assert machine.on(OutputArrived("nonsense", "y")) == [ReleaseOutput("y")]


@pytest.mark.parametrize("wanted", [("text", "audio"), ("audio",), ("text",)])
@pytest.mark.parametrize("cut", range(5))
def test_an_abort_at_any_point_ends_under_the_requests_own_final_output(wanted, cut):
    """#7006 I1, I2, I5: one end, of the stage and output this request asked for last."""
    needed = SPEAKS if "audio" in wanted else ("thinker",)
    machine = request(wanted, needed)
    actions = []
    for event in [RequestAdmitted(), *[RunAccepted(s) for s in machine.runs][:cut]]:
        actions += machine.on(event)
    actions += machine.on(life.RequestCancelled("abort"))
    [end] = [a for a in actions if isinstance(a, EndRequest)]
    assert (end.output, end.stage) == (("audio", "voice") if "audio" in wanted else ("text", "thinker"))
    assert end.finish_reason == "abort"
    assert isinstance(end.error, Cancelled)
    assert machine.on(life.RequestCancelled("again")) == []


def test_an_abort_after_the_text_has_ended_still_ends_the_audio():
    """#7006 I4, I5: the text is not repeated, the audio gets the end."""
    machine = after(*OPENED, OutputArrived("text", 1), RunFinished("thinker", "stop", {"tokens": 1}))
    [stop_voice, stop_talker, end] = machine.on(life.RequestCancelled("abort"))
    assert (stop_voice, stop_talker) == (StopRun("voice"), StopRun("talker"))
    assert (end.outcome, end.output, end.stage) == (Outcome.CANCELLED, "audio", "voice")
    assert end.usage == {"tokens": 1}
    assert machine.on(OutputArrived("audio", "late")) == [ReleaseOutput("late")]
    assert machine.on(RunFinished("talker", STOPPED, {"tokens": 99})) == [CloseRun("talker")]
    assert machine.on(RunFinished("voice", STOPPED, {})) == [CloseRun("voice"), ForgetRequest()]
    assert machine.usage == {"tokens": 1}, "a stopped run's usage comes too late for the end"


def test_a_run_accepted_after_the_end_is_stopped():
    machine = after(RequestAdmitted(), RunAccepted("voice"))
    assert machine.on(life.RequestCancelled("abort"))[0] == StopRun("voice")
    assert machine.on(RunAccepted("talker")) == [StopRun("talker")]
    assert machine.on(RunFinished("voice", STOPPED, {})) == [CloseRun("voice")]
    assert machine.on(RunFinished("talker", STOPPED, {})) == [CloseRun("talker")]
    assert machine.on(OpenFailed("thinker", OOPS)) == [CloseRun("thinker"), ForgetRequest()]


def test_a_refusal_while_others_open_ends_the_request_once_and_stops_each_when_it_is_accepted():
    machine = after(RequestAdmitted(), RunAccepted("thinker"))
    close, stop, end = machine.on(OpenFailed("talker", OOPS))
    assert (close, stop) == (CloseRun("talker"), StopRun("thinker"))
    assert end.error is OOPS
    assert machine.on(OpenFailed("voice", StageFailed("no", "voice"))) == [CloseRun("voice")], "one end"
    assert machine.on(RunFinished("thinker", STOPPED, {})) == [CloseRun("thinker"), ForgetRequest()]


def test_a_death_while_others_open_connects_nothing():
    machine = after(RequestAdmitted(), RunAccepted("talker"))
    assert machine.on(RunFailed("talker", OOPS, lost=True))[0] == CloseRun("talker", lost=True)
    assert machine.on(RunAccepted("thinker")) == [StopRun("thinker")]
    assert machine.on(RunAccepted("voice")) == [StopRun("voice")]


def test_a_producer_learns_of_a_consumer_that_ended_before_it_was_accepted():
    """Else its chunks for it would wait without end, and the run with them."""
    machine = after(RequestAdmitted(), RunAccepted("talker"), RunFinished("talker", "stop", {}))
    assert machine.on(RunAccepted("thinker")) == [DropConsumer("thinker", "talker")]


def test_a_request_is_opening_until_all_stages_that_it_needs_have_accepted():
    machine = request(("audio", "words"), SPOKEN, ALIGNED)
    machine.on(RequestAdmitted())
    for stage in ("talker", "voice"):
        assert stage in machine.opening
        machine.on(RunAccepted(stage))
    assert not machine.opening, "`reader` and `aligner` are optional"


def test_completion_stops_what_still_runs():
    machine = after(*OPENED)
    machine.on(RunFinished("thinker", "stop", {}))
    actions = machine.on(RunFinished("voice", "stop", {}))  # the vocoder met the end of speech first
    assert [type(a) for a in actions] == [CloseRun, StopRun, EndRequest]
    assert actions[1] == StopRun("talker")
    assert machine.on(RunFinished("talker", STOPPED, {})) == [CloseRun("talker"), ForgetRequest()]


def test_a_run_that_stops_without_being_asked_is_a_failure():
    actions = after(*OPENED).on(RunFinished("talker", STOPPED, {}))
    [end] = [a for a in actions if isinstance(a, EndRequest)]
    assert end.outcome is Outcome.FAILED
    assert end.error.line() == "[stage_failed:talker] stopped without being asked to"


def test_a_failure_that_names_no_place_gets_the_stages():
    actions = after(*OPENED).on(RunFailed("voice", Unavailable("no"), lost=True))
    assert actions[0] == CloseRun("voice", lost=True)
    [end] = [a for a in actions if isinstance(a, EndRequest)]
    assert end.error.where == "voice"


def test_a_run_that_ends_before_it_is_accepted_is_a_failure():
    """Nothing may wait without end: its producers would keep what they have for it."""
    machine = after(RequestAdmitted())
    close, end = machine.on(RunFinished("voice", "stop", {}))
    assert close == CloseRun("voice")
    assert end.error.line() == "[stage_failed:voice] ended before it was accepted"


def test_every_way_a_request_can_fail_names_one_error():
    for event in (RunFailed("talker", OOPS), OpenFailed("talker", OOPS), RequestExpired(OOPS)):
        [end] = [a for a in after(*OPENED).on(event) if isinstance(a, EndRequest)]
        assert end.error is OOPS
        assert end.finish_reason == "error"


# --- random lives --------------------------------------------------------------------------------------------------
DIAMOND = Pipeline(
    "diamond",
    tuple(Stage(name, _no_engine) for name in ("listener", "brain", "pen", "mouth")),
    (Edge("listener", "brain"), Edge("brain", "pen"), Edge("brain", "mouth"), Edge("pen", "mouth")),
    (Output("text", "brain"), Output("image", "pen"), Output("audio", "mouth")),
    (Operation("chat", "brain", ("text",)),),
)
ALIGNED = Pipeline(
    "aligned",
    tuple(Stage(name, _no_engine) for name in ("thinker", "talker", "voice", "reader", "aligner")),
    (Edge("thinker", "talker"), Edge("talker", "voice"), Edge("voice", "reader"), Edge("reader", "aligner")),
    (Output("text", "thinker"), Output("audio", "voice"), Output("words", "aligner", optional=True)),
    (Operation("chat", "thinker", ("text",)), Operation("speech", "talker", ("audio",))),
)
"""An optional output behind two stages that only it needs."""
CASES = (
    (CHAIN, ("text", "audio"), SPEAKS),
    (CHAIN, ("audio",), SPEAKS),
    (CHAIN, ("text",), ("thinker",)),
    (CHAIN, ("audio",), ("talker", "voice")),
    (DIAMOND, ("text", "image", "audio"), ("listener", "brain", "pen", "mouth")),
    (DIAMOND, ("image",), ("brain", "pen")),
    (ALIGNED, ("audio", "words"), ("talker", "voice", "reader", "aligner")),
    (ALIGNED, ("text", "audio", "words"), ("thinker", "talker", "voice", "reader", "aligner")),
    (ALIGNED, ("words",), ("talker", "voice", "reader", "aligner")),
)


# --- optional outputs ---
SPOKEN = ("talker", "voice", "reader", "aligner")


def spoken(accepted=SPOKEN):
    machine = request(("audio", "words"), SPOKEN, ALIGNED)
    machine.on(RequestAdmitted())
    for stage in [s for s in reversed(SPOKEN) if s in accepted]:
        machine.on(RunAccepted(stage))
    return machine


def test_a_failed_optional_stage_ends_its_output_alone():
    machine = spoken()
    actions = machine.on(RunFailed("aligner", StageFailed("lost", "aligner"), lost=True))
    assert actions == [CloseRun("aligner", lost=True), StopRun("reader"), DropConsumer("voice", "reader")]
    assert machine.missing == {"words": "[stage_failed:aligner] lost"}
    assert machine.on(OutputArrived("words", 1)) == [ReleaseOutput(1)]
    assert machine.on(OutputArrived("audio", 2)) == [EmitOutput("audio", 0, 2)]
    assert machine.on(RunFinished("reader", STOPPED, {"n": 1})) == [CloseRun("reader")]
    machine.on(RunFinished("talker", "stop", {}))
    close, end, done = machine.on(RunFinished("voice", "stop", {}))
    assert (close, done) == (CloseRun("voice"), ForgetRequest())
    assert (end.outcome, end.output, end.missing) == (Outcome.COMPLETED, "audio", machine.missing)
    assert "n" not in end.usage, "what a run that was given up counted is not the request's"


def test_an_optional_stage_that_cannot_be_opened_is_left_out():
    machine = request(("audio", "words"), SPOKEN, ALIGNED)
    machine.on(RequestAdmitted())
    assert machine.on(OpenFailed("aligner", OOPS)) == [CloseRun("aligner")]
    assert machine.on(RunAccepted("reader")) == [StopRun("reader")]
    assert machine.on(RunAccepted("voice")) == [DropConsumer("voice", "reader")]


def test_a_producer_that_was_being_opened_learns_of_the_loss_when_it_is_accepted():
    machine = spoken(("aligner", "reader"))
    machine.on(RunFailed("aligner", OOPS))
    assert machine.on(RunAccepted("voice")) == [DropConsumer("voice", "reader")]


def test_a_late_optional_stage_is_given_up_and_the_request_completes():
    machine = spoken()
    for stage in ("talker", "voice"):
        assert not machine.only_optional_left
        machine.on(RunFinished(stage, "stop", {}))
    assert machine.only_optional_left
    late = DeadlineExceeded("nothing for 10 s", "optional output words")
    *stops, end = machine.on(RequestExpired(late, stalled=True))
    assert stops == [StopRun("reader"), StopRun("aligner")] or stops == [StopRun("aligner"), StopRun("reader")]
    assert (end.outcome, end.missing) == (Outcome.COMPLETED, {"words": late.line()})


def test_a_stall_gives_up_optional_outputs_first_and_the_request_only_then():
    machine = spoken()
    late = DeadlineExceeded("nothing for 9 s", "voice->reader")
    assert EndRequest not in [type(action) for action in machine.on(RequestExpired(late, stalled=True))]
    assert machine.on(RequestExpired(late, stalled=True))[-1].error == late


def test_an_optional_output_that_was_asked_for_alone_counts():
    machine = request(("words",), SPOKEN, ALIGNED)
    machine.on(RequestAdmitted())
    for stage in reversed(SPOKEN):
        machine.on(RunAccepted(stage))
    *_, end = machine.on(RunFailed("aligner", StageFailed("lost", "aligner")))
    assert (end.outcome, end.output, end.missing) == (Outcome.FAILED, "words", {})


class World:
    """Everything outside the machine, behaving as badly as it may; checks what the machine decides."""

    def __init__(self, rng, pipeline, wanted, needed):
        self.rng = rng
        self.machine = request(wanted, needed, pipeline)
        self.outputs = {o.name: o.stage for o in pipeline.outputs}
        self.asked, self.accepted, self.stopped, self.closed = set(), set(), set(), set()
        self.items = Counter()
        self.made = 0
        self.end = None
        self.done = False
        self.emitted = Counter()
        self.dropped, self.connected = set(), set()
        self.event = None

    def tell(self, event):
        self.event = event
        if isinstance(event, OutputArrived):
            self.made += 1
        actions = self.machine.on(event)
        for action in actions:
            assert not self.done, "something after Done"
            self.take(action)
        if self.end is None and not isinstance(event, RequestAdmitted):
            waiting = self.asked - self.closed
            assert waiting or not self.asked, "nothing will ever happen again"
            for stage in self.accepted - self.closed - self.stopped:
                consumers = self.machine.pipeline.downstream(stage, self.accepted)
                known = {c for s, c in self.connected | self.dropped if s == stage}
                assert known >= consumers, "a stage waits for a consumer that it never hears of"

    def take(self, action):
        match action:
            case OpenRun(stage):
                assert self.end is None
                assert stage in self.machine.needed
                assert stage not in self.asked, "opened twice"
                assert stage not in self.machine.unneeded
                self.asked.add(stage)
            case EmitOutput(output, index, item):
                assert self.end is None
                assert output in self.machine.wanted and output not in self.machine.missing
                assert index == self.emitted[output], "in order, without gaps"
                self.emitted[output] += 1
                self.items[item] += 1
            case ReleaseOutput(item):
                self.items[item] += 1
            case StopRun(stage):
                assert stage in self.accepted - self.closed
                assert stage not in self.stopped, "stopped twice"
                self.stopped.add(stage)
            case DropConsumer(stage, consumer):
                assert stage in self.accepted - self.closed
                assert consumer in self.machine.unneeded | self.closed
                self.dropped.add((stage, consumer))
            case ConnectConsumer(stage, consumer):
                assert self.end is None
                assert {stage, consumer} <= self.accepted - self.closed, "a stage sends to one that has accepted"
                assert (stage, consumer) not in self.connected, "connected twice"
                self.connected.add((stage, consumer))
            case CloseRun(stage):
                assert stage in self.asked
                assert stage not in self.closed, "closed twice"
                self.closed.add(stage)
            case EndRequest():
                assert self.end is None, "two ends"
                self.end = action
                wanted = [o for o in self.machine.pipeline.outputs if o.name in self.machine.wanted]
                required = [o for o in wanted if not o.optional] or wanted
                assert action.output == required[-1].name
                assert action.stage == self.outputs[action.output]
                assert set(action.missing) <= {o.name for o in wanted if o not in required}
                if action.outcome is Outcome.FAILED and not isinstance(self.event, RequestExpired):
                    leading = [self.machine.pipeline.leading_to(o.stage) for o in required]
                    assert any(self.event.stage in stages for stages in leading), "an optional stage ended the request"
            case ForgetRequest():
                assert self.end is not None
                assert self.closed == self.asked
                self.done = True

    def step(self):
        """One thing that may happen now."""
        rng, opening = self.rng, self.asked - self.accepted - self.closed
        running = self.accepted - self.closed
        draw = rng.random()
        if opening and draw < 0.35:
            stage = rng.choice(sorted(opening))
            if rng.random() < 0.93:
                self.accepted.add(stage)
                self.tell(RunAccepted(stage))
            else:
                kind = rng.choice((OpenFailed, RunFailed))
                self.tell(kind(stage, OOPS))
        elif running and draw < 0.55:
            stage = rng.choice(sorted(running))
            late = stage in self.stopped and rng.random() < 0.8
            self.tell(RunFinished(stage, STOPPED if late else rng.choice(("stop", "length")), {"n": 1}))
        elif running and draw < 0.58:
            self.tell(RunFailed(rng.choice(sorted(running)), OOPS, rng.random() < 0.5))
        elif draw < 0.60:
            ends = (life.RequestCancelled("abort"), RequestExpired(OOPS), RequestExpired(OOPS, stalled=True))
            self.tell(rng.choice(ends))
        elif draw < 0.65 and self.asked:  # late or repeated news of any stage
            stage = rng.choice(sorted(self.asked))
            if stage in self.closed:
                late = (
                    RunAccepted(stage),
                    RunFinished(stage, "stop", {}),
                    RunFailed(stage, OOPS, True),
                    OpenFailed(stage, OOPS),
                )
                self.tell(rng.choice(late))
        else:
            self.tell(OutputArrived(rng.choice(list(self.outputs)), self.made))


def test_random_lives():
    rng = random.Random(20_260)
    outcomes, given_up = Counter(), 0
    for _ in range(20_000):
        world = World(rng, *rng.choice(CASES))
        if rng.random() < 0.98:
            world.tell(RequestAdmitted())
        for _ in range(400):
            if world.done:
                break
            world.step()
        assert world.done, "a life that does not end"
        for event in (
            life.RequestCancelled("late"),
            RequestExpired(OOPS),
            OutputArrived("text", world.made),
            RequestAdmitted(),
        ):
            if isinstance(event, OutputArrived):
                world.done = False  # a late item is still released
                world.tell(event)
                world.done = True
            else:
                assert world.machine.on(event) == []
        assert set(world.items) == set(range(world.made))
        assert set(world.items.values()) <= {1}, "an item handled twice"
        assert world.closed == world.asked
        outcomes[world.end.outcome] += 1
        for stage, consumer in world.dropped:
            assert stage in world.machine.pipeline.upstream(consumer, world.machine.needed)
        given_up += bool(world.end.missing and world.end.outcome is Outcome.COMPLETED)
    assert all(outcomes[outcome] > 1_000 for outcome in Outcome), outcomes
    assert given_up > 300, given_up
