# SPDX-License-Identifier: Apache-2.0
"""What the supervisor decides: observations in, actions out. No clock, no processes, no I/O.

A stub restarts its own worker. The supervisor acts when a stub is dead, when an instance is silent or not ready beyond
a bound, or when the server is dead or silent. The wait doubles from try to try until a healthy period. Reloads that do
not help lead to a restart of the server, restarts that do not help to giving up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from triton_omni.backends.control.records import Role, State


@dataclass(frozen=True)
class Bounds:
    """Time limits of the supervisor in seconds, and two counts.

    silent_s       a server or orchestrator without an answer, or a stub that is stuck, is hung after this
    stage_silent_s the same for a stage's worker; above the stages' own hang_s, so that the stub acts first
    not_ready_s    longest time in which a stub may bring its worker back
    helped_s       a try helped if there is no problem for this long after it
    healthy_s      time without a problem that resets the wait
    first_wait_s   wait before the second try; doubles up to `longest_wait_s`
    max_reloads    tries of one model that did not help before the server is restarted
    max_restarts   tries of the server that did not help before giving up
    """

    silent_s: float = 30.0
    stage_silent_s: float = 300.0
    not_ready_s: float = 1200.0  # above a stage's default start_timeout_s: a 30B model is loaded by its own stub
    helped_s: float = 5.0
    healthy_s: float = 60.0
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    max_reloads: int = 3
    max_restarts: int = 6


@dataclass(frozen=True)
class InstanceStatus:
    """One worker, or an orchestrator, as observed: its record, whether its stub lives and it answered the probe."""

    name: str
    model: str
    role: Role
    state: State
    stub_alive: bool
    answered: bool
    live: int = 0
    stub_pid: int = 0


@dataclass(frozen=True)
class Observation:
    """What was seen at one moment. `reloaded`: models whose reload ended since the last time, with an error text."""

    now_s: float
    server_alive: bool
    server_answers: bool
    instances: Sequence[InstanceStatus] = ()
    reloaded: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Reload:
    """Unload a model and load it again."""

    model: str
    why: str


@dataclass(frozen=True)
class RestartServer:
    """End what is left of the server and start it again."""

    why: str


@dataclass(frozen=True)
class GiveUp:
    """Nothing helped: end with an error."""

    why: str


Action = Reload | RestartServer | GiveUp


@dataclass
class Attempts:
    """Tries of one remedy: how many there were and how many did not help, both since the last healthy period."""

    count: int = 0
    failed: int = 0
    not_before_s: float = 0.0
    quiet_since_s: float = 0.0

    def note(self, now_s: float, bounds: Bounds) -> None:
        """Record a try; the next one has to wait longer."""
        self.quiet_since_s = now_s
        self.not_before_s = now_s + min(bounds.longest_wait_s, bounds.first_wait_s * 2**self.count)
        self.count += 1
        self.failed += 1

    def problem(self, now_s: float, bounds: Bounds) -> None:
        """Record that there is a problem again: how long it was quiet says whether the last try helped."""
        quiet_s = now_s - self.quiet_since_s
        if quiet_s >= bounds.helped_s:
            self.failed = 0
        if quiet_s >= bounds.healthy_s:
            self.count = 0
        self.quiet_since_s = now_s


class Watch:
    """The supervisor's memory between observations."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.problems: tuple[str, ...] = ()
        """What is wrong now, in words; empty if all is well. Set by every `decide`."""
        self._wrong_since: dict[str, float] = {}
        self._reloading: set[str] = set()
        self._failed: dict[str, str] = {}  # models that a reload left without any instance
        self._reloads: dict[str, Attempts] = {}
        self._restarts = Attempts()

    def decide(self, seen: Observation) -> list[Action]:
        """What to do about one observation."""
        self._take_reloads(seen)
        self.problems = ()
        dead = self._server_problem(seen)
        if dead:
            return self._restart(dead, seen.now_s)
        wrong = self._wrong_models(seen)
        stuck = {s.model: f"{s.name}: stuck" for s in seen.instances if s.state == "stuck" and s.stub_alive}
        self.problems = tuple((stuck | wrong).values())
        by_orchestrator = {s.model for s in seen.instances if s.role == "orchestrator" and not _unloads(s)} & set(wrong)
        if by_orchestrator:
            return self._restart(wrong[min(by_orchestrator)], seen.now_s)
        actions: list[Action] = []
        for model in sorted(wrong):
            actions += self._reload(model, wrong[model], seen.now_s)
        restarts = [a for a in actions if isinstance(a, (RestartServer, GiveUp))]
        return list(restarts[:1]) or actions

    def restarted(self, now_s: float) -> None:
        """The server was started again, successfully or not: forget what was known of its models."""
        self._restarts.quiet_since_s = now_s
        self._wrong_since.clear()
        self._reloading.clear()
        self._failed.clear()
        self._reloads.clear()

    def _take_reloads(self, seen: Observation) -> None:
        for model, error in seen.reloaded.items():
            self._reloading.discard(model)
            self._reloads[model].quiet_since_s = seen.now_s
            self._failed.pop(model, None)
            if error:
                self._failed[model] = error

    def _server_problem(self, seen: Observation) -> str:
        if not seen.server_alive:
            return self._only_problem("tritonserver has ended")
        if self._lasts("server", not seen.server_answers, seen.now_s, self.bounds.silent_s):
            return self._only_problem(f"tritonserver has not answered for {self.bounds.silent_s:.0f} s")
        return ""

    def _only_problem(self, problem: str) -> str:
        self.problems = (problem,)
        return problem

    def _wrong_models(self, seen: Observation) -> dict[str, str]:
        """Model → what is wrong with one of its instances; models in reload are left alone."""
        wrong = dict(self._failed)
        serving = {(s.model, s.stub_pid) for s in seen.instances if s.state == "ready" and s.stub_alive and s.answered}
        for instance in seen.instances:
            problem = self._instance_problem(instance, seen.now_s)
            if instance.model in self._reloading:
                continue
            is_cared_for = instance.stub_alive and (instance.model, instance.stub_pid) in serving  # by its stub
            if problem and not is_cared_for:
                wrong[instance.model] = problem
        return wrong

    def _instance_problem(self, instance: InstanceStatus, now_s: float) -> str:
        silent = instance.state == "ready" and not instance.answered and instance.stub_alive
        unready = instance.state not in ("ready", "stuck", "waiting") and instance.stub_alive
        bound_s = self.bounds.stage_silent_s if instance.role == "stage" else self.bounds.silent_s
        hung = self._lasts(f"silent {instance.name}", silent, now_s, bound_s)
        long_unready = self._lasts(f"unready {instance.name}", unready, now_s, self.bounds.not_ready_s)
        stopped = instance.state == "stuck" and instance.stub_alive
        stuck = self._lasts(f"stuck {instance.name}", stopped, now_s, self.bounds.silent_s)
        if not instance.stub_alive:
            return f"{instance.name}: its stub has died"
        if instance.state == "gave_up":
            return f"{instance.name}: its stub gave up restarting the worker"
        if hung:
            return f"{instance.name}: no sign of life for {bound_s:.0f} s"
        if stuck:
            return f"{instance.name}: stuck for {self.bounds.silent_s:.0f} s"
        if long_unready:
            return f"{instance.name}: '{instance.state}' for {self.bounds.not_ready_s:.0f} s"
        return ""

    def _lasts(self, key: str, wrong: bool, now_s: float, bound_s: float) -> bool:
        """True if `wrong` has been true without a break for the bound."""
        if not wrong:
            self._wrong_since.pop(key, None)
            return False
        return now_s - self._wrong_since.setdefault(key, now_s) >= bound_s

    def _reload(self, model: str, why: str, now_s: float) -> list[Action]:
        tries = self._reloads.setdefault(model, Attempts())
        tries.problem(now_s, self.bounds)
        if tries.failed >= self.bounds.max_reloads:
            return self._restart(f"{why}; {tries.failed} reloads did not help", now_s)
        if now_s < tries.not_before_s:
            return []
        tries.note(now_s, self.bounds)
        self._reloading.add(model)
        return [Reload(model, why)]

    def _restart(self, why: str, now_s: float) -> list[Action]:
        self._restarts.problem(now_s, self.bounds)
        if self._restarts.failed >= self.bounds.max_restarts:
            return [GiveUp(f"{why}; {self._restarts.failed} restarts did not help")]
        if now_s < self._restarts.not_before_s:
            return []
        self._restarts.note(now_s, self.bounds)
        return [RestartServer(why)]


def _unloads(instance: InstanceStatus) -> bool:
    """True for an orchestrator that can end its requests itself: it answers, but cannot open runs."""
    return instance.state == "stuck" and instance.stub_alive and instance.answered
