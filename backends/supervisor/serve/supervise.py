# SPDX-License-Identifier: Apache-2.0
"""The supervisor: starts tritonserver and the proxy, looks after them once a second, and ends them cleanly."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from triton_omni.backends.config.paths import RUN_DIR_VARIABLE
from triton_omni.backends.control import probe
from triton_omni.backends.control.address import parse_address
from triton_omni.backends.control.records import InstanceRecord, read_records, remove_record
from triton_omni.backends.supervisor.errors import Report, SetupError
from triton_omni.backends.supervisor.serve import processes, run_folder
from triton_omni.backends.supervisor.serve.launch import Launch, log_errors, log_tail
from triton_omni.backends.supervisor.serve.watch import Action, GiveUp, InstanceStatus, Observation, Reload, Watch

TURN_S = 1.0
PROBE_TIMEOUT_S = 2.0
PROXY_PATIENCE_S = 10.0
PROXY_WAIT_S = 5.0  # between two starts of a proxy that ends at once
PROXY_START_TIMEOUT_S = 60.0
UNLOAD_TIMEOUT_S = 15.0  # an unload waits for the model's open requests; `load` is tried all the same
STOP_MARGIN_S = 10.0
IDLE_STOP_S = 3.0  # a server without requests ends within a second of SIGTERM
SWEEP_S = 60.0


@dataclass
class Plan:
    """What one supervisor runs.

    proxy          command of the OpenAI proxy; empty: none
    start_timeout_s how long the models may take to load
    info_file      gets the facts (addresses, pids, key) once all is ready; for demo and tests
    welcome        said once all is ready
    """

    launch: Launch
    watch: Watch
    server_log: Path
    proxy_log: Path
    proxy: Sequence[str] = ()
    start_timeout_s: float = 900.0
    info_file: Path | None = None
    welcome: str = ""


class Supervisor:
    """One server, its proxy and the loop that looks after them. All of it on the main thread, except reloads."""

    def __init__(self, plan: Plan, report: Report) -> None:
        self.plan = plan
        self._stopping = threading.Event()  # set by SIGINT and SIGTERM
        self._at_once = False  # set by the second of them: the children are not waited for
        self._report = report
        self._server: subprocess.Popen[bytes] | None = None
        self._proxy: subprocess.Popen[bytes] | None = None
        self._ready_s = 0.0
        self._sweep_until_s = 0.0  # regions of dead stubs are looked for until then
        self._proxy_not_before_s = 0.0
        self._reloads: dict[str, Future[str]] = {}
        self._pool = ThreadPoolExecutor(2, "reload")
        self._probes = ThreadPoolExecutor(8, "probe")
        self._reported: tuple[str, ...] = ()
        self._not_loaded: tuple[str, ...] = ()

    # --- life ----------------------------------------------------------------------------------------------------
    def run(self) -> int:
        """Start, look after, end; returns the exit code. Raises SetupError if the first start fails."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        processes.adopt_orphans()
        try:
            self._health("starting")
            if not self._start_server():
                return 0
            self._start_proxy()
            if not self._stopping.is_set():
                self._ready()
                if self.plan.welcome:
                    self._report(self.plan.welcome)
            return self._look_after()
        finally:
            self._end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._at_once = self._stopping.is_set()
        self._stopping.set()

    def _ready(self) -> None:
        facts = self._facts()
        run_folder.write_json(self.plan.launch.run_dir.path / run_folder.FACTS_FILE, facts)
        if self.plan.info_file is not None:
            run_folder.write_json(self.plan.info_file, facts)
        self._health("degraded" if self._not_loaded else "ready", self._not_loaded)

    def _facts(self) -> dict[str, object]:
        launch = self.plan.launch
        return {
            "host": launch.api().host,
            "http_port": launch.ports.http,
            "grpc_port": launch.ports.grpc,
            "metrics_port": launch.ports.metrics,
            "openai_port": launch.ports.openai if self._proxy else 0,
            "key": launch.key,
            "run_dir": str(launch.run_dir.path),
            "shm_prefix": launch.run_dir.shm_prefix,
            "supervisor_pid": os.getpid(),
            "server_pid": self._server.pid if self._server else 0,
            "proxy_pid": self._proxy.pid if self._proxy else 0,
            "ready_s": round(self._ready_s, 1),
            "server_log": str(self.plan.server_log),
        }

    def _look_after(self) -> int:
        while not self._stopping.wait(TURN_S):
            processes.reap_strangers()
            self._sweep()
            actions = self.plan.watch.decide(self._observe())
            self._tell(actions)
            for action in actions:
                if isinstance(action, GiveUp):
                    self._health("gave_up", (action.why,))
                    return 1
                if isinstance(action, Reload):
                    self._reloads[action.model] = self._pool.submit(self._reload, action.model)
                else:
                    self._restart_server()
            if not actions:
                self._look_after_proxy()
        return 0

    def _sweep(self) -> None:
        """Remove what dead stubs left, for a while after each reload, and never while a model is being loaded."""
        if time.monotonic() < self._sweep_until_s and not self._reloads and self._server is not None:
            self.plan.launch.run_dir.remove_dead_regions(self._server.pid)

    def _tell(self, actions: Sequence[Action]) -> None:
        problems = (*self.plan.watch.problems, *self._not_loaded)
        for problem in problems:
            if problem not in self._reported:
                self._report(f"problem: {problem}")
        if self._reported and not problems:
            self._report("all well again")
        self._reported = problems
        for action in actions:
            self._report(f"{type(action).__name__}: {action.why}")
        self._health("degraded" if problems or self._reloads else "ready", problems)

    def _health(self, state: str, problems: Sequence[str] = ()) -> None:
        folder = self.plan.launch.run_dir.path
        run_folder.write_json(
            folder / run_folder.HEALTH_FILE, {"state": state, "problems": list(problems), "at": time.time()}
        )

    # --- observing -----------------------------------------------------------------------------------------------
    def _observe(self) -> Observation:
        launch = self.plan.launch
        alive = self._server is not None and self._server.poll() is None
        if self._not_loaded and (models := launch.api().models()):  # an operator may have loaded it since
            self._not_loaded = self._missing(models)
        records = read_records(launch.run_dir.path) if alive else []
        reloaded = {model: future.result() for model, future in self._reloads.items() if future.done()}
        if reloaded:
            self._sweep_until_s = time.monotonic() + SWEEP_S
        self._reloads = {model: f for model, f in self._reloads.items() if model not in reloaded}
        return Observation(
            now_s=time.monotonic(),
            server_alive=alive,
            server_answers=alive and launch.api().is_live(PROBE_TIMEOUT_S),
            instances=list(self._probes.map(observe_instance, records)),
            reloaded=reloaded,
        )

    # --- acting --------------------------------------------------------------------------------------------------
    def _reload(self, model: str) -> str:
        """Unload, then load: for a model that Triton believes loaded and unchanged, `load` alone does nothing."""
        for record in read_records(self.plan.launch.run_dir.path):
            if (record.model, record.role, record.state) == (model, "stage", "stuck"):
                processes.send(record.pid, record.start_time, signal.SIGKILL)  # it would never answer an unload
        api = self.plan.launch.api()
        api.is_model_ready(model)  # in newer servers this reaps a stub that died with requests in flight
        unloaded = api.control("unload", model, UNLOAD_TIMEOUT_S)
        error = api.control("load", model, self.plan.start_timeout_s)
        return f"{error} ({unloaded})" if error and unloaded else error

    def _restart_server(self) -> None:
        self._health("restarting")
        self._end_server(patience_s=0.0)
        self._reloads.clear()
        try:
            if self._start_server():
                self._ready()
        except SetupError as error:
            self._report(f"restart failed: {error.message}")
        self.plan.watch.restarted(time.monotonic())

    def _start_server(self) -> bool:
        """Start the server and wait until it is ready; False if a signal asks to stop meanwhile."""
        launch = self.plan.launch
        for record in read_records(launch.run_dir.path):
            remove_record(launch.run_dir.path, record.model, record.instance)
        for left in launch.run_dir.path.glob("*.sock"):  # of workers that were killed together with their stubs
            left.unlink(missing_ok=True)
        self._server = launch.start(self.plan.server_log)
        start = time.monotonic()
        shown: dict[str, str] = {}
        while not self._stopping.wait(0.25):
            if self._server.poll() is not None:
                raise self._no_start("tritonserver ended while loading the models")
            self._show_instances(shown, start)
            if launch.api().is_live(PROBE_TIMEOUT_S):  # it answers when all models are loaded, or cannot be
                self._show_instances(shown, start)
                models = launch.api().models()
                if not models:
                    continue
                self._not_loaded = self._missing(models)
                if len(self._not_loaded) == len(launch.repositories):
                    raise self._no_start("no pipeline could be loaded")
                self._ready_s = time.monotonic() - start
                name = f"tritonserver {launch.api().version()}"
                self._report(f"{name} is ready after {self._ready_s:.1f} s (pid {self._server.pid})")
                return True
            if time.monotonic() - start > self.plan.start_timeout_s:
                raise self._no_start(f"the models were not ready after {self.plan.start_timeout_s:.0f} s")
        return False

    def _missing(self, models: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
        """A problem for every pipeline that is not loaded."""
        missing: list[str] = []
        for pipeline, names in self.plan.launch.pipelines().items():
            states = [models.get(name, ("", f"{name} is unknown to the server")) for name in sorted(names)]
            reasons = [reason for state, reason in states if state != "READY"]
            if reasons:
                missing.append(f"pipeline {pipeline} is not loaded: {'; '.join(dict.fromkeys(reasons))}")
        return tuple(missing)

    def _no_start(self, what: str) -> SetupError:
        log = self.plan.server_log
        return SetupError(f"{what}; it says:\n{log_errors(log)}", hint=f"the whole log is {log}")

    def _show_instances(self, shown: dict[str, str], start: float) -> None:
        """Report what the stubs say of themselves: tritonserver answers nothing before all models are loaded."""
        for record in read_records(self.plan.launch.run_dir.path):
            name = f"{record.model}#{record.instance}"
            if record.state not in ("stuck", shown.get(name)):  # on a busy machine a loading stub stands still at times
                shown[name] = record.state
                self._report(f"  {time.monotonic() - start:6.1f} s  {name}: {record.state}")

    def _start_proxy(self) -> None:
        if not self.plan.proxy:
            return
        launch = self.plan.launch
        self._proxy_not_before_s = time.monotonic() + PROXY_WAIT_S
        with self.plan.proxy_log.open("ab") as sink:
            environment = {**os.environ, RUN_DIR_VARIABLE: str(launch.run_dir.path)}
            self._proxy = processes.start(list(self.plan.proxy), environment, sink.fileno(), str(launch.run_dir.path))
        if not self._proxy_listens(self._proxy) and not self._stopping.is_set():
            processes.stop(self._proxy, 0.0)
            log = self.plan.proxy_log
            raise SetupError(f"the proxy does not start; it says:\n{log_tail(log)}", hint=f"the whole log is {log}")

    def _proxy_listens(self, proxy: subprocess.Popen[bytes]) -> bool:
        """Wait until the proxy takes connections; False if it ended, did not come up in time, or we are to stop."""
        api, port = self.plan.launch.api(), self.plan.launch.ports.openai
        start = time.monotonic()
        while not self._stopping.wait(0.1) and time.monotonic() - start < PROXY_START_TIMEOUT_S:
            if proxy.poll() is not None:
                return False
            with contextlib.suppress(OSError), socket.create_connection((api.host, port), 1.0):
                return True
        return False

    def _look_after_proxy(self) -> None:
        if self._proxy is not None and self._proxy.poll() is not None and time.monotonic() > self._proxy_not_before_s:
            self._report(
                f"the proxy ended with code {self._proxy.returncode}; starting it again ({self.plan.proxy_log})"
            )
            try:
                self._start_proxy()
                self._ready()
            except SetupError as error:
                self._report(error.message)

    # --- ending --------------------------------------------------------------------------------------------------
    def _end_server(self, patience_s: float) -> None:
        """End the server and all that it left: processes that carry the run's mark, regions of its prefix."""
        run_dir = self.plan.launch.run_dir
        if self._server is not None:
            if patience_s and self._server.poll() is None:
                self._server.terminate()
                processes.wait_until(self._stop_is_over(self._server), patience_s)
            processes.stop(self._server, 0.0)
            self._server = None

        def left_behind() -> list[int]:
            return [pid for pid in run_dir.processes() if self._proxy is None or pid != self._proxy.pid]

        if patience_s:  # workers go by themselves when their stub has gone
            processes.wait_until(lambda: not left_behind(), processes.LEFTOVER_PATIENCE_S)
        if left := left_behind():
            self._report(f"ending what the server left: pids {left}")
            processes.end_all(left, processes.LEFTOVER_PATIENCE_S)
        run_dir.remove_leftovers()

    def _stop_is_over(self, server: subprocess.Popen[bytes]) -> Callable[[], bool]:
        """True once the server has ended or waits for nothing.

        A stream that its client cancelled or does not read can hold up an unload for the whole exit time-out, although
        no instance has a request any more.
        """
        records = read_records(self.plan.launch.run_dir.path)
        busy_s = time.monotonic()

        def is_over() -> bool:
            nonlocal busy_s
            if server.poll() is not None:
                return True
            states = self._probes.map(observe_instance, records)
            if any(state.stub_alive and (state.live or not state.answered) for state in states):
                busy_s = time.monotonic()
            return time.monotonic() - busy_s >= IDLE_STOP_S

        return is_over

    def _end(self) -> None:
        """End everything: the proxy first, so that it reports no dying server to its clients."""
        patience_s = 0.0 if self._at_once else self.plan.launch.exit_timeout_s + STOP_MARGIN_S
        if self._proxy is not None:
            processes.stop(self._proxy, min(patience_s, PROXY_PATIENCE_S))
            self._proxy = None
        self._end_server(patience_s)
        for pool in (self._pool, self._probes):
            pool.shutdown(wait=False, cancel_futures=True)
        self.plan.launch.run_dir.remove()


def observe_instance(record: InstanceRecord) -> InstanceStatus:
    """One instance as it is now. One that starts is not probed: its record says that it is not ready."""
    alive = processes.is_alive(record.pid, record.start_time)
    answer = None
    is_remote = bool(record.address) and not parse_address(record.address).is_local  # its stub hears its heartbeat
    if alive and record.state in ("ready", "stuck") and not is_remote:
        with contextlib.suppress(OSError):  # it does not listen, it hung up, or it did not answer in time
            answer = probe(record.address, PROBE_TIMEOUT_S)
    name, live = f"{record.model}#{record.instance}", answer.live if answer else 0
    answered = answer is not None or is_remote
    return InstanceStatus(name, record.model, record.role, record.state, alive, answered, live, record.pid)
