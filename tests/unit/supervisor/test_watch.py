# SPDX-License-Identifier: Apache-2.0
"""The supervisor's decisions: a made-up clock, made-up observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from triton_omni.backends.control.records import Role, State
from triton_omni.backends.supervisor.serve.watch import (
    Action,
    Bounds,
    GiveUp,
    InstanceStatus,
    Observation,
    Reload,
    RestartServer,
    Watch,
)

BOUNDS = Bounds(
    silent_s=10,
    stage_silent_s=40,
    not_ready_s=100,
    healthy_s=60,
    first_wait_s=1,
    longest_wait_s=8,
    max_reloads=3,
    max_restarts=4,
)


def instance(
    model: str = "m", role: Role = "stage", *, state: State = "ready", alive: bool = True, answered: bool = True
) -> InstanceStatus:
    return InstanceStatus(f"{model}#0", model, role, state, alive, answered)


def seen(
    now_s: float,
    *instances: InstanceStatus,
    alive: bool = True,
    answers: bool = True,
    reloaded: dict[str, str] | None = None,
) -> Observation:
    return Observation(now_s, alive, answers, instances, reloaded or {})


def kinds(actions: Sequence[Action]) -> list[type]:
    return [type(action) for action in actions]


@pytest.fixture
def watch() -> Watch:
    return Watch(BOUNDS)


def test_all_well_means_nothing_to_do(watch: Watch) -> None:
    assert watch.decide(seen(0, instance(), instance("pipeline", "orchestrator"))) == []
    assert watch.problems == ()


def test_dead_stage_stub_reloads_its_model_once(watch: Watch) -> None:
    dead = instance("talker", alive=False)
    (action,) = watch.decide(seen(0, dead, instance("thinker")))
    assert action == Reload("talker", "talker#0: its stub has died")
    assert watch.decide(seen(1, dead)) == []  # the reload is under way
    assert watch.decide(seen(2, instance("talker"), reloaded={"talker": ""})) == []


def test_two_dead_stages_are_reloaded_together(watch: Watch) -> None:
    actions = watch.decide(seen(0, instance("a", alive=False), instance("b", alive=False)))
    assert [a.model for a in actions if isinstance(a, Reload)] == ["a", "b"]


def test_one_dead_instance_of_two_reloads_the_model(watch: Watch) -> None:
    twins = [
        InstanceStatus("m#0", "m", "stage", "ready", True, True),
        InstanceStatus("m#1", "m", "stage", "ready", False, False),
    ]
    assert watch.decide(seen(0, *twins)) == [Reload("m", "m#1: its stub has died")]


def test_dead_orchestrator_stub_restarts_the_server(watch: Watch) -> None:
    actions = watch.decide(seen(0, instance("pipeline", "orchestrator", alive=False), instance("m", alive=False)))
    assert actions == [RestartServer("pipeline#0: its stub has died")]


def test_dead_server_restarts(watch: Watch) -> None:
    assert kinds(watch.decide(seen(0, alive=False, answers=False))) == [RestartServer]


def test_server_is_hung_only_after_unbroken_silence(watch: Watch) -> None:
    assert watch.decide(seen(0, answers=False)) == []
    assert watch.decide(seen(9, answers=False)) == []
    assert watch.decide(seen(10, answers=True)) == []
    assert watch.decide(seen(11, answers=False)) == []
    assert watch.decide(seen(20, answers=False)) == []
    assert kinds(watch.decide(seen(21, answers=False))) == [RestartServer]


def test_silent_stage_is_reloaded_after_the_bound(watch: Watch) -> None:
    silent = instance(answered=False)
    assert watch.decide(seen(0, silent)) == []
    assert watch.decide(seen(39.9, silent)) == []
    assert kinds(watch.decide(seen(40, silent))) == [Reload]


def test_silent_orchestrator_restarts_the_server(watch: Watch) -> None:
    silent = instance("pipeline", "orchestrator", answered=False)
    assert watch.decide(seen(0, silent)) == []
    assert kinds(watch.decide(seen(10, silent))) == [RestartServer]


@pytest.mark.parametrize("state", ["starting", "restarting"])
def test_a_stub_may_take_its_time_to_heal_its_worker(watch: Watch, state: State) -> None:
    healing = instance(state=state, answered=False)
    assert watch.decide(seen(0, healing)) == []
    assert watch.decide(seen(99, healing)) == []
    assert kinds(watch.decide(seen(100, healing))) == [Reload]


def test_a_healed_worker_resets_the_bound(watch: Watch) -> None:
    healing = instance(state="restarting", answered=False)
    watch.decide(seen(0, healing))
    watch.decide(seen(99, instance()))
    assert watch.decide(seen(100, healing)) == []


def test_a_stub_that_gave_up_is_reloaded_at_once(watch: Watch) -> None:
    assert kinds(watch.decide(seen(0, instance(state="gave_up", answered=False)))) == [Reload]


def test_a_stuck_stage_stub_is_a_trouble_at_once_and_reloaded_after_the_bound(watch: Watch) -> None:
    stuck = instance(state="stuck")
    assert watch.decide(seen(0, stuck)) == []
    assert watch.problems == ("m#0: stuck",)
    assert watch.decide(seen(9.9, stuck)) == []
    assert watch.decide(seen(10, stuck)) == [Reload("m", "m#0: stuck for 10 s")]


def test_a_stub_that_goes_on_in_time_is_left_alone(watch: Watch) -> None:
    watch.decide(seen(0, instance(state="stuck")))
    watch.decide(seen(9, instance()))
    assert watch.problems == ()
    assert watch.decide(seen(10, instance(state="stuck"))) == []


def test_an_orchestrator_that_opens_nothing_but_answers_is_reloaded(watch: Watch) -> None:
    stuck = instance("pipeline", "orchestrator", state="stuck")
    watch.decide(seen(0, stuck))
    assert watch.decide(seen(10, stuck)) == [Reload("pipeline", "pipeline#0: stuck for 10 s")]


def test_a_stopped_orchestrator_restarts_the_server(watch: Watch) -> None:
    """Its clients would never get an answer, as only the orchestrator ends their calls."""
    stuck = instance("pipeline", "orchestrator", state="stuck", answered=False)
    watch.decide(seen(0, stuck))
    assert kinds(watch.decide(seen(10, stuck))) == [RestartServer]


def test_reloads_wait_longer_each_time_then_the_server_restarts(watch: Watch) -> None:
    dead = instance(alive=False)
    assert kinds(watch.decide(seen(0, dead))) == [Reload]
    assert watch.decide(seen(0.5, dead, reloaded={"m": "load m: no"})) == []  # 1 s after the first
    assert watch.problems == ("m#0: its stub has died",)
    assert kinds(watch.decide(seen(1, dead))) == [Reload]
    assert watch.decide(seen(2.9, dead, reloaded={"m": ""})) == []  # 2 s after the second
    assert kinds(watch.decide(seen(3, dead))) == [Reload]
    (action,) = watch.decide(seen(4, dead, reloaded={"m": ""}))
    assert action == RestartServer("m#0: its stub has died; 3 reloads did not help")


def test_a_model_that_a_failed_reload_left_without_instances_is_tried_again(watch: Watch) -> None:
    watch.decide(seen(0, instance(alive=False), instance("n")))
    assert watch.decide(seen(0.5, instance("n"), reloaded={"m": "load m: no"})) == []
    assert watch.problems == ("load m: no",)
    assert watch.decide(seen(1, instance("n"))) == [Reload("m", "load m: no")]
    assert watch.decide(seen(2, instance("n"), instance(), reloaded={"m": ""})) == []
    assert watch.problems == ()


def test_a_reload_that_held_for_a_while_starts_afresh(watch: Watch) -> None:
    dead = instance(alive=False)
    now_s = 0.0
    for _ in range(10):
        assert kinds(watch.decide(seen(now_s, dead))) == [Reload]
        assert watch.decide(seen(now_s + 5, instance(), reloaded={"m": ""})) == []
        now_s += 5 + BOUNDS.healthy_s


def test_reloads_that_helped_never_restart_the_server(watch: Watch) -> None:
    """A stub that was killed four times within a minute cost every other pipeline its requests."""
    dead, now_s = instance(alive=False), 0.0
    for _ in range(8):
        actions: list[Action] = []
        while not actions:  # each reload waits longer than the one before
            now_s += 0.5
            actions = watch.decide(seen(now_s, dead))
        assert kinds(actions) == [Reload]
        assert watch.decide(seen(now_s + 1, instance(), reloaded={"m": ""})) == []
        now_s += 1 + BOUNDS.helped_s


def test_a_problem_that_lasts_while_a_reload_waits_is_no_quiet_time(watch: Watch) -> None:
    watch = Watch(replace(BOUNDS, first_wait_s=8))  # waits are longer than `helped_s`
    dead, actions, reloads = instance(alive=False), list[Action](), 0
    for half_s in range(200):
        actions = watch.decide(seen(half_s / 2, dead, reloaded=dict.fromkeys(("m",), "") if kinds(actions) else None))
        if RestartServer("m#0: its stub has died; 3 reloads did not help") in actions:
            break
        reloads += len(actions)
    assert reloads == BOUNDS.max_reloads


def test_restarts_back_off_and_give_up(watch: Watch) -> None:
    now_s = 0.0
    times: list[float] = []
    actions: list[Action] = []
    for _ in range(2000):
        actions = watch.decide(seen(now_s, alive=False, answers=False))
        if kinds(actions) == [RestartServer]:
            times.append(now_s)
            watch.restarted(now_s)
        elif actions:
            break
        now_s += 0.5
    assert times == [0.0, 1.0, 3.0, 7.0]
    assert actions == [GiveUp("tritonserver has ended; 4 restarts did not help")]


def test_a_server_that_takes_long_to_load_and_dies_at_once_is_given_up_too(watch: Watch) -> None:
    now_s = 0.0
    for _ in range(BOUNDS.max_restarts):
        assert kinds(watch.decide(seen(now_s, alive=False, answers=False))) == [RestartServer]
        watch.restarted(now_s + 300)  # loading alone took longer than the quiet time
        now_s += 301
    assert kinds(watch.decide(seen(now_s, alive=False, answers=False))) == [GiveUp]


def test_after_a_restart_old_troubles_are_void(watch: Watch) -> None:
    silent = instance(answered=False)
    watch.decide(seen(0, silent))
    watch.decide(seen(5, alive=False, answers=False))
    watch.restarted(6)
    assert watch.decide(seen(12, silent)) == []
