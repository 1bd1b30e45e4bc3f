# SPDX-License-Identifier: Apache-2.0
"""Ports, flags and environment of one tritonserver, its start and its state. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import http
import http.client
import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_omni.backends.child_process import INTERPRETER_VARIABLES, clean_environment
from triton_omni.backends.config.paths import LOOPBACK_HOSTS, LOOPBACK_VARIABLE, RUN_DIR_VARIABLE
from triton_omni.backends.supervisor.errors import SetupError
from triton_omni.backends.supervisor.gpu_host import gpu_devices
from triton_omni.backends.supervisor.serve import processes
from triton_omni.backends.supervisor.serve.locate import Server
from triton_omni.backends.supervisor.serve.run_folder import RunDir

LOCAL = "127.0.0.1"
KEY_HEADER = "triton-omni-key"
RESTRICTED = "model-repository,shared-memory,logging,trace"
NEWER_OPTIONS = {"--allow-client-shm": "true"}  # since 26.05; before, clients' shared memory was always allowed
_TAIL_LINES = 25
_SEARCHED_LINES = 2000
_SHOWN_ERRORS = 6
_ERROR_CHARS = 600
_ERROR_LINE = re.compile(r"^(E\d{4} (?!.*CudaDriverHelper)|error: |\| \w+ +\| \d+ +\| UNAVAILABLE)")


@dataclass(frozen=True)
class Ports:
    """Where one server listens; metrics included."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002
    openai: int = 9000


def free_ports() -> Ports:
    """Ports that are free now."""
    holders = [socket.socket() for _ in range(4)]
    try:
        for holder in holders:
            holder.bind((LOCAL, 0))
        return Ports(*(holder.getsockname()[1] for holder in holders))
    finally:
        for holder in holders:
            holder.close()


def check_ports(ports: Ports, host: str = LOCAL, proxy: bool = True) -> None:
    """Raises SetupError naming the first port that is taken."""
    wanted = {"http": ports.http, "grpc": ports.grpc, "metrics": ports.metrics}
    if proxy:
        wanted["openai"] = ports.openai
    for name, port in wanted.items():
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise SetupError(
                        f"cannot listen on {host}:{port}: {error.strerror}", hint="use another --host"
                    ) from error
                raise SetupError(
                    f"port {port} ({name}) is in use on {host}",
                    hint=f"end what listens there (ss -ltnp 'sport = :{port}' shows it), "
                    f"or choose --{name}-port N, or --any-port for free ones",
                ) from error


@dataclass(frozen=True)
class Launch:
    """One server's start: what is run, with which environment.

    key  the operator's key: callers of the RESTRICTED APIs must send it; empty: no restriction and no model control
    """

    server: Server
    repositories: Sequence[Path]
    ports: Ports
    run_dir: RunDir
    host: str = LOCAL
    key: str = ""
    exit_timeout_s: int = 60
    flags: Sequence[str] = ()

    def command(self) -> list[str]:
        """The tritonserver command line."""
        ports, key = self.ports, f"{KEY_HEADER}={self.key}"
        command = [
            str(self.server.binary),
            *(f"--model-repository={path}" for path in self.repositories),
            f"--backend-directory={self.server.backends}",
            f"--http-address={self.host}",
            f"--http-port={ports.http}",
            f"--grpc-address={self.host}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-address={self.host}",
            f"--metrics-port={ports.metrics}",
            f"--backend-config=python,shm-region-prefix-name={self.run_dir.shm_prefix}",
            f"--exit-timeout-secs={self.exit_timeout_s}",
        ]
        command += [f"{name}={value}" for name, value in NEWER_OPTIONS.items() if name in self.server.options]
        # no model of ours takes GPU memory from tritonserver itself
        command += [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(len(gpu_devices()))]
        if len(self.repositories) > 1:  # one pipeline that cannot be loaded must not take the others along
            command.append("--exit-on-error=false")
        if self.key:
            command += [
                "--model-control-mode=explicit",
                "--load-model=*",
                f"--http-restricted-api={RESTRICTED}:{key}",
                f"--grpc-restricted-protocol={RESTRICTED}:{key}",
            ]
        return [*command, *self.flags]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The server's whole environment. What torch compiles is kept; by default it would be a temporary file."""
        kept = {"TORCHINDUCTOR_CACHE_DIR": str(Path("~/.cache/torchinductor").expanduser())}
        folders = {RUN_DIR_VARIABLE: str(self.run_dir.path), "TMPDIR": str(self.run_dir.temporary)}
        folders |= self._loopback()
        return {**kept, **clean_environment(base), **folders, **self.server.environment}

    def _loopback(self) -> dict[str, str]:
        return {LOOPBACK_VARIABLE: "1"} if self.host in LOOPBACK_HOSTS else {}

    def by_hand(self) -> str:
        """The same start as one shell command; it works when typed by hand, without the run folder."""
        shown = {**self.server.environment, **self._loopback()}
        if "PATH" in shown:
            shown["PATH"] = shown["PATH"].split(":")[0] + ":$PATH"
        variables = [f'{name}="{value}"' for name, value in shown.items()]
        unset = [f"-u {name}" for name in INTERPRETER_VARIABLES if name not in shown]
        return " ".join(["env", *unset, *variables, shlex.join(self.command())])

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        """Start the server, its output appended to `log`. Not from the repository: its packages must be installed."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            sink.write(f"$ {self.by_hand()}\n".encode())
            sink.flush()
            environment = self.environment(os.environ)
            return processes.start(self.command(), environment, sink.fileno(), environment["TMPDIR"])

    @property
    def key_header(self) -> str:
        """The header that opens the restricted APIs over HTTP; over gRPC its name is triton-grpc-protocol-<name>."""
        return f"{KEY_HEADER}: {self.key}"

    def api(self) -> Api:
        """Access to the running server."""
        return Api(LOCAL if self.host == "0.0.0.0" else self.host, self.ports.http, self.key)

    def pipelines(self) -> dict[str, set[str]]:
        """Pipeline → its models. A repository holds the models of one pipeline and has its name."""
        return {path.name: {config.parent.name for config in path.glob("*/config.pbtxt")} for path in self.repositories}


@dataclass(frozen=True)
class Api:
    """The few HTTP calls to tritonserver that a supervisor needs."""

    host: str
    port: int
    key: str = ""

    def call(self, method: str, path: str, body: object = None, timeout_s: float = 5.0) -> tuple[int, Any]:
        """Status and decoded answer (None if it is no JSON). Raises OSError if the server cannot be reached."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        headers = {"Content-Type": "application/json", **({KEY_HEADER: self.key} if self.key else {})}
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            data = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{path}: {error!r}") from error
        finally:
            connection.close()
        try:
            return answer.status, json.loads(data)
        except ValueError:
            return answer.status, None

    def is_live(self, timeout_s: float = 5.0) -> bool:
        """True if the server answers at all."""
        return self._answers("/v2/health/live", timeout_s)

    def is_ready(self, timeout_s: float = 5.0) -> bool:
        """True if every model is loaded."""
        return self._answers("/v2/health/ready", timeout_s)

    def is_model_ready(self, model: str, timeout_s: float = 5.0) -> bool:
        """True if a model is loaded and, from 26.07 on, its stubs live."""
        return self._answers(f"/v2/models/{model}/ready", timeout_s)

    def _answers(self, path: str, timeout_s: float) -> bool:
        try:
            return self.call("GET", path, timeout_s=timeout_s)[0] == http.HTTPStatus.OK
        except OSError:
            return False

    def version(self) -> str:
        """The server's version, such as 2.51.0; empty if it does not answer."""
        with contextlib.suppress(OSError, TypeError, KeyError):
            return str(self.call("GET", "/v2")[1]["version"])
        return ""

    def models(self, timeout_s: float = 5.0) -> dict[str, tuple[str, str]]:
        """State and reason of each model the server knows; empty while it does not answer."""
        try:
            status, index = self.call("POST", "/v2/repository/index", {}, timeout_s)
        except OSError:
            return {}
        if status != http.HTTPStatus.OK or not isinstance(index, list):
            return {}
        return {m["name"]: (m.get("state", ""), m.get("reason", "")) for m in index}

    def control(self, verb: str, model: str, timeout_s: float) -> str:
        """`load` or `unload` a model; returns an error text, or nothing."""
        try:
            status, answer = self.call("POST", f"/v2/repository/models/{model}/{verb}", {}, timeout_s)
        except OSError as error:
            return f"{verb} {model}: {error}"
        if status == http.HTTPStatus.OK:
            return ""
        return f"{verb} {model}: {answer['error'] if isinstance(answer, dict) and 'error' in answer else status}"


def log_errors(log: Path) -> str:
    """The server's own error lines, or its last lines if it wrote none."""
    text = log_tail(log, _SEARCHED_LINES)
    errors = [line[:_ERROR_CHARS] for line in text.splitlines() if _ERROR_LINE.match(line)]
    return "\n".join(errors[-_SHOWN_ERRORS:]) or log_tail(log)


def log_tail(log: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a server's log, for an error text."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
