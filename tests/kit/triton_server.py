# SPDX-License-Identifier: Apache-2.0
"""A real tritonserver for tests: bare or supervised, on free ports, not started from the repository, ended by pid."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.kit.budgets import within
from triton_omni.backends.config.paths import operator_key
from triton_omni.backends.control.records import InstanceRecord, read_records
from triton_omni.backends.repository import write
from triton_omni.backends.supervisor.errors import SetupError
from triton_omni.backends.supervisor.home import REPO, find_home
from triton_omni.backends.supervisor.serve import processes, run_folder
from triton_omni.backends.supervisor.serve.launch import LOCAL, Api, Launch, free_ports, log_tail
from triton_omni.backends.supervisor.serve.locate import find_server
from triton_omni.backends.supervisor.serve.temporary import temporary_server

VERSIONS: set[str] = set()
"""Versions of the servers that this process started."""
OPERATOR_KEYS: dict[str, str] = {}
"""gRPC address → operator's key, of the servers that this process started."""
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
KEPT_LOGS = 40


@dataclass
class RunningServer:
    """A ready server. `pid` is tritonserver's at start; a supervised one may be restarted (see `server_pid`)."""

    http_port: int
    grpc_port: int
    metrics_port: int
    openai_port: int
    key: str
    run_dir: Path
    shm_prefix: str
    pid: int
    supervisor_pid: int
    log: Path

    @property
    def http(self) -> str:
        return f"{LOCAL}:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"{LOCAL}:{self.grpc_port}"

    @property
    def metrics(self) -> str:
        return f"http://{LOCAL}:{self.metrics_port}/metrics"

    @property
    def openai(self) -> str:
        """Base URL for an OpenAI SDK; only with proxy."""
        return f"http://{LOCAL}:{self.openai_port}/v1"

    @property
    def operator_key(self) -> str:
        """For the list of requests and to abort any of them; a supervised server also has it as `key`."""
        return operator_key(self.run_dir)

    @property
    def api(self) -> Api:
        return Api(LOCAL, self.http_port, self.key)

    def server_pid(self) -> int:
        """tritonserver's pid now; 0 while a supervised one restarts for the first time."""
        facts = run_folder.read_json(self.run_dir / run_folder.FACTS_FILE)
        return self.pid if facts is None else int(facts["server_pid"])

    def health(self) -> str:
        """The supervisor's word on the whole: "ready", "degraded", "restarting", …; empty for a bare server."""
        found = run_folder.read_json(self.run_dir / run_folder.HEALTH_FILE)
        return "" if found is None else str(found["state"])

    def instances(self) -> list[InstanceRecord]:
        """The instance records: stub pids, worker pids, addresses."""
        return read_records(self.run_dir)

    def instance(self, model: str, instance: str = "0_0") -> InstanceRecord:
        """One instance's record now; LookupError while it has none (in a reload)."""
        for record in self.instances():
            if (record.model, record.instance) == (model, instance):
                return record
        raise LookupError(f"{model}#{instance} has no record")

    def processes(self) -> list[int]:
        """Pids of everything that belongs to this server, the supervisor not included."""
        return processes.marked(f"TRITON_OMNI_RUN_DIR={self.run_dir}")

    def regions(self) -> list[str]:
        """Its names in /dev/shm."""
        return [p.name for p in run_folder.SHM.iterdir() if p.name.startswith(self.shm_prefix)]

    def log_tail(self, lines: int = 60) -> str:
        return log_tail(self.log, lines)


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str = "condition") -> None:
    """Wait for something that another process does; fails the test after the time-out, longer on a loaded machine."""
    timeout_s = within(timeout_s)
    assert processes.wait_until(condition, timeout_s), f"not within {timeout_s:.1f} s: {what}"


@contextmanager
def running_server(
    repositories: Sequence[Path],
    *,
    supervised: bool = False,
    proxy: bool = False,
    flags: Sequence[str] = (),
    serve_options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    timeout_s: float = READY_TIMEOUT_S,
) -> Iterator[RunningServer]:
    """A ready server for the `with` body.

    flags          for tritonserver
    serve_options  for the supervisor's `serve`
    variables      for the server's environment
    """
    paths, environment = [Path(r).resolve() for r in repositories], dict(variables or {})
    with tempfile.TemporaryDirectory(prefix="omni-test-") as folder:
        if supervised:
            options = [*serve_options, *([] if proxy else ["--no-proxy"])]
            for path in paths:
                options += ["--repository", str(path)]
            yield from _supervised(Path(folder), [*options, "--", *flags], environment, timeout_s)
        else:
            assert not proxy and not serve_options, "those are the supervisor's"
            yield from _bare(Path(folder), paths, flags, environment, timeout_s)


def _bare(
    folder: Path, repositories: list[Path], flags: Sequence[str], variables: Mapping[str, str], timeout_s: float
) -> Iterator[RunningServer]:
    log, run_dir, ports = folder / "server.log", run_folder.make(), free_ports()
    server = find_server(find_home())
    server = replace(server, environment={**server.environment, **variables})
    launch = Launch(server, repositories, ports, run_dir, exit_timeout_s=10, flags=flags)
    child = launch.start(log)
    try:
        processes.wait_until(lambda: launch.api().is_ready(2.0) or child.poll() is not None, timeout_s)
        assert child.poll() is None and launch.api().is_ready(2.0), f"server not ready:\n{_kept(log)}"
        VERSIONS.add(launch.api().version())
        OPERATOR_KEYS[f"{LOCAL}:{ports.grpc}"] = operator_key(run_dir.path)
        yield RunningServer(
            ports.http, ports.grpc, ports.metrics, 0, "", run_dir.path, run_dir.shm_prefix, child.pid, 0, log
        )
    finally:
        processes.stop(child, STOP_TIMEOUT_S)
        _kept(log)
        run_dir.remove()


def _supervised(
    folder: Path, options: Sequence[str], variables: Mapping[str, str], timeout_s: float
) -> Iterator[RunningServer]:
    log, run_dir = folder / "supervisor.log", Path()
    options = ["--exit-timeout-s", "10", *options]  # a cancelled gRPC stream can pin a model until then (24.10)
    try:
        with log.open("ab") as sink, temporary_server(options, sink.fileno(), timeout_s, variables) as facts:
            run_dir = Path(facts["run_dir"])
            OPERATOR_KEYS[f"{LOCAL}:{facts['grpc_port']}"] = facts["key"]
            VERSIONS.add(Api(LOCAL, facts["http_port"]).version())
            yield RunningServer(
                facts["http_port"], facts["grpc_port"], facts["metrics_port"], facts["openai_port"], facts["key"],
                run_dir, facts["shm_prefix"], facts["server_pid"], facts["supervisor_pid"], Path(facts["server_log"]),
            )  # fmt: skip
    except SetupError as problem:
        raise AssertionError(f"{problem.message}:\n{log_tail(log, 60)}") from None
    finally:
        swept = run_folder.sweep(print)
        _kept(log)
    assert run_dir not in swept, "the supervisor had to be killed"


def _kept(log: Path) -> str:
    """Copy a test server's log to where it outlives the test; returns its end. Old copies go."""
    logs = find_home().logs
    logs.mkdir(parents=True, exist_ok=True)
    if log.exists():
        shutil.copy(log, logs / f"test-{log.stem}-{log.parent.name}.log")
    for old in sorted(logs.glob(f"test-{log.stem}-*.log"), key=lambda path: path.stat().st_mtime)[:-KEPT_LOGS]:
        old.unlink(missing_ok=True)
    return log_tail(log, 60)


def toy_repository(out: Path, deploy: str) -> Path:
    """A model repository of the toy with another deploy.yaml."""
    file = out / "deploy.yaml"
    file.write_text(deploy)
    write(out, file)
    return out / "toy"


TOY_REPOSITORY = REPO / "model_repository" / "toy"
CHAT_REPOSITORY = REPO / "model_repository" / "chat"
