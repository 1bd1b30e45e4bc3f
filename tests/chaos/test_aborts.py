# SPDX-License-Identifier: Apache-2.0
"""Aborts and departures in every phase, on the real server. Letters: cases of vLLM-Omni #7006, see README.md here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import tritonclient.grpc as grpcclient

from tests.kit.load_generator import Life, Plan, abort, body, run_many, run_one, send
from tests.kit.server_calls import generate, holdings, idle, metrics, wait_until_idle
from tests.kit.triton_server import RunningServer, wait_for
from triton_omni.backends.control import probe
from triton_omni.backends.supervisor.serve.processes import wait_until

pytestmark = [pytest.mark.triton, pytest.mark.timeout(120)]
CANCELLED = 'omni_requests_total{outcome="cancelled",pipeline="toy"}'
OPENED = 'omni_stage_runs_opened_total{{pipeline="toy",stage="{}"}}'


@pytest.fixture
def toy(toy_server: RunningServer) -> Iterator[RunningServer]:
    run_one(toy_server.grpc, Plan(body(2)))  # every counter and link exists
    yield toy_server
    wait_until_idle(toy_server)


@dataclass
class Started:
    """A request that a thread is making."""

    lives: list[Life] = field(default_factory=list[Life])

    @property
    def life(self) -> Life:
        assert len(self.lives) == 1, "it has not ended"
        return self.lives[0]


@contextmanager
def started(toy: RunningServer, plan: Plan, reached: Callable[[], bool]) -> Iterator[Started]:
    """Make a request; the body runs when `reached`, and afterwards the request has ended."""
    made = Started()
    client = threading.Thread(target=lambda: made.lives.append(run_one(toy.grpc, plan)))
    client.start()
    try:
        wait_for(reached, 20, "the phase")
        yield made
    finally:
        client.join(60)


def numbers(toy: RunningServer, stage: str) -> dict[str, float]:
    """A worker's live runs and counters."""
    sign = probe(toy.instance(f"toy_{stage}").address, 5)
    return {**sign.numbers, "live": sign.live}


def live(toy: RunningServer, *stages: str) -> Callable[[], bool]:
    """True when exactly these stages work on one run."""
    return lambda: all(numbers(toy, s)["live"] == (s in stages) for s in ("tokens", "frames", "wave"))


PHASES = {  # the request's stage options, the stages that run then, the end's identity, how many pieces came
    "b: before the first token": (("audio",), {"tokens": {"hold_after": 0}}, ("tokens", "frames", "wave"), "audio"),
    "a: a silent last stage": (("audio",), {"wave": {"hold_after": 2}}, ("wave",), "audio"),
    "c: text alone": (("text",), {"tokens": {"hold_after": 2}}, ("tokens",), "text"),
    "d: the text is done": (("text", "audio"), {"frames": {"hold_after": 1}}, ("frames", "wave"), "audio"),
    "a silent middle": (("text", "audio"), {"frames": {"hold_after": 0}}, ("frames", "wave"), "audio"),
    "behind a full slab": (  # the first stage is done, most of its chunks have no room
        ("audio",),
        {"tokens": {"frame_bytes": 9 << 20, "burst": 10}, "frames": {"hold_after": 0}},
        ("frames", "wave"),
        "audio",
    ),
}
FINAL = {"text": ("text", "tokens"), "audio": ("audio", "wave")}


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_ends_once_under_the_requests_own_final_output(toy: RunningServer, phase: str) -> None:
    modalities, stages, at_work, final = PHASES[phase]
    before = metrics(toy)
    plan = Plan(body(20 if "slab" in phase else 5, modalities, **stages), request_id="abort-me")
    with started(toy, plan, live(toy, *at_work)) as request:
        abort(toy.grpc, "toy", "abort-me")
    life = request.life
    assert (life.ends, life.final, life.late) == (["abort"], FINAL[final], 0)
    assert life.words == (5 if "d:" in phase or "middle" in phase else 2 if "c:" in phase else 0)
    wait_for(live(toy), 5, "every stage free")
    after = metrics(toy)
    assert after[CANCELLED] == before.get(CANCELLED, 0) + 1
    if final == "text":  # the stages that it does not need never received it
        assert all(after[OPENED.format(s)] == before[OPENED.format(s)] for s in ("frames", "wave"))
    assert run_one(toy.grpc, Plan(body(5, modalities), request_id="abort-me")).ends[0] in ("length", "stop")


@pytest.mark.parametrize("phase", PHASES)
def test_f_a_client_that_leaves_frees_every_stage(toy: RunningServer, phase: str) -> None:
    """No end can be delivered, but the same road is taken: counted once, every slot and descriptor given back."""
    modalities, stages, at_work, _ = PHASES[phase]
    warm = {stage: {"frame_bytes": 1 << 20} for stage in ("tokens", "frames")}
    run_many(toy.grpc, [Plan(body(20, **warm)) for _ in range(8)], 8)
    wait_until_idle(toy)
    before, counted = holdings(toy), metrics(toy).get(CANCELLED, 0)
    with grpcclient.InferenceServerClient(toy.grpc) as client:
        client.start_stream(lambda result, error: None)
        try:
            send(client, Plan(body(20 if "slab" in phase else 5, modalities, **stages)))
            wait_for(live(toy, *at_work), 20, "the phase")
        finally:
            client.stop_stream(cancel_requests=True)
    wait_until_idle(toy)
    assert metrics(toy)[CANCELLED] == counted + 1
    del before["tritonserver fds"]  # its gRPC keeps one more or less
    assert wait_until(lambda: all(holdings(toy)[k] <= n for k, n in before.items()), 5), (before, holdings(toy))


def test_e_aborts_are_idempotent_never_stick_and_unknown_ids_are_harmless(toy: RunningServer) -> None:
    def aborted(target: str) -> int:
        _, answer = generate(
            toy, request=f'{{"operation": "abort", "target": "{target}"}}', operator_key=toy.operator_key
        )
        return answer["event"]["aborted"]

    before = metrics(toy)
    held = Plan(body(5, ("audio",), wave={"hold_after": 1}), request_id="twice")
    neighbour = Plan(body(5, ("audio",), wave={"hold_after": 1}), request_id="twice0")
    with started(toy, neighbour, live(toy, "wave")) as other:
        with started(toy, held, lambda: numbers(toy, "wave")["live"] == 2) as request:
            assert [aborted("twice"), aborted("twice"), aborted("unknown")] == [1, 0, 0]
            refused = generate(toy, request='{"operation": "abort"}')
            assert (refused[0], "[bad_request:target]" in refused[1]["error"]) == (400, True), refused
        assert request.life.ends == ["abort"]
        assert not other.lives, "an id that only starts alike was aborted too"
        assert aborted("twice0") == 1
    assert aborted("twice") == aborted("twice0") == 0  # ended ids
    assert [life.ends for life in run_many(toy.grpc, [Plan(body(5, ("audio",)), request_id="twice")] * 4, 2)] == [
        ["stop"]
    ] * 4
    assert metrics(toy)[CANCELLED] == before.get(CANCELLED, 0) + 2


def test_a_cancelled_run_takes_no_more_steps(toy: RunningServer) -> None:
    """Counted, not timed: once its slot is free, the entry stage takes exactly the steps of the next request."""
    slow = Plan(body(1000, ("text", "audio"), tokens={"delay_s": 0.005}), cancel_after=20)
    assert run_one(toy.grpc, slow).ends == ["cancelled here"]
    wait_for(lambda: idle(toy) and live(toy)(), 5, "every slot free")
    before = numbers(toy, "tokens")["steps"]
    assert run_one(toy.grpc, Plan(body(10, ("text",)))).ends == ["length"]
    assert numbers(toy, "tokens")["steps"] == before + 10


@pytest.mark.parametrize(
    ("stages", "modalities", "place"),
    [
        ({"tokens": {"hold_after": 5}}, ("audio",), "tokens->frames"),
        ({"frames": {"hold_after": 5}}, ("audio",), "frames->wave"),
        ({"frames": {"hold_after": 5}}, ("text", "audio"), "frames->wave"),
    ],
)
def test_a_lost_terminal_is_an_error_that_names_both_ends(
    toy: RunningServer, stages: dict, modalities: tuple[str, ...], place: str
) -> None:
    """The producer makes all but its last chunk and goes silent."""
    silent = body(6, modalities, **stages) | {"deadlines": {"stall_s": 1.0}}
    life = run_one(toy.grpc, Plan(silent, timeout_s=30))
    assert len(life.ends) == 1 and f"deadline_exceeded:{place}]" in life.ends[0], life.ends
