# SPDX-License-Identifier: Apache-2.0
"""One server's command line, ports and answers."""

from __future__ import annotations

import http.server
import json
import shlex
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from triton_omni.backends.supervisor.errors import SetupError
from triton_omni.backends.supervisor.serve.launch import LOCAL, Api, Launch, Ports, check_ports, free_ports, log_errors
from triton_omni.backends.supervisor.serve.locate import Server
from triton_omni.backends.supervisor.serve.run_folder import RunDir

VARIABLES = {"PATH": "/stub/bin:/usr/bin", "A": "b c"}
SERVER = Server(Path("/t/bin/tritonserver"), Path("/t/backends"), VARIABLES, Path("/stub/bin/python3"), False)
RUN_DIR = RunDir(Path("/tmp/omni-run-x"), "omnix_", 1, 2)


def launch(**changes: object) -> Launch:
    values = {"server": SERVER, "repositories": [Path("/r1"), Path("/r2")], "ports": Ports(), "run_dir": RUN_DIR}
    return Launch(**{**values, **changes})  # type: ignore[arg-type]


def test_command() -> None:
    command = launch(key="k", exit_timeout_s=7, flags=["--log-verbose=1"]).command()
    assert command[0] == "/t/bin/tritonserver"
    assert [w for w in command if w.startswith("--model-repository")] == [
        "--model-repository=/r1",
        "--model-repository=/r2",
    ]
    for word in (
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
        "--backend-config=python,shm-region-prefix-name=omnix_",
        "--exit-timeout-secs=7",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--http-restricted-api=model-repository,shared-memory,logging,trace:triton-omni-key=k",
        "--grpc-restricted-protocol=model-repository,shared-memory,logging,trace:triton-omni-key=k",
    ):
        assert word in command
    assert command[-1] == "--log-verbose=1"


def test_bare_command_has_no_model_control_and_no_key() -> None:
    command = " ".join(launch().command())
    assert "explicit" not in command and "restricted" not in command


def test_options_of_newer_servers_are_given_where_the_server_has_them() -> None:
    newer = replace(SERVER, options=frozenset({"--allow-client-shm", "--http-port"}))
    assert "--allow-client-shm=true" in launch(server=newer).command()
    assert not any("client-shm" in word for word in launch().command())


def test_the_command_by_hand_is_the_command() -> None:
    words = shlex.split(launch(key="k").by_hand())
    assert words[0] == "env" and "A=b c" in words and "PATH=/stub/bin:$PATH" in words
    assert words[-len(launch(key="k").command()) :] == launch(key="k").command()
    assert not any("omni-run" in word for word in words)


def test_environment_names_the_run_dir(tmp_path: Path) -> None:
    misleading = {"PYTHONPATH": "/x", "PYTHONHOME": "/y", "VIRTUAL_ENV": "/z", "A": "other", "TMPDIR": "/t"}
    start = replace(launch(), run_dir=replace(launch().run_dir, path=tmp_path))
    assert start.environment({**misleading, "LANG": "C", "TORCHINDUCTOR_CACHE_DIR": "/cache"}) == {
        "LANG": "C",
        "PATH": "/stub/bin:/usr/bin",
        "A": "b c",
        "TRITON_OMNI_RUN_DIR": str(tmp_path),
        "TMPDIR": str(tmp_path / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": "/cache",
        "TRITON_OMNI_LOOPBACK": "1",
    }
    assert "TRITON_OMNI_LOOPBACK" not in replace(start, host="0.0.0.0").environment({})
    assert (tmp_path / "tmp").is_dir()


def test_a_port_in_use_is_named_with_the_way_out() -> None:
    with socket.socket() as holder:
        holder.bind((LOCAL, 0))
        holder.listen()
        taken = holder.getsockname()[1]
        with pytest.raises(SetupError, match=rf"port {taken} \(grpc\) is in use") as caught:
            check_ports(Ports(0, taken, 0, 0))
    assert "--grpc-port" in caught.value.hint and "--any-port" in caught.value.hint


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports()
    assert len({ports.http, ports.grpc, ports.metrics, ports.openai}) == 4
    check_ports(ports)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers like tritonserver's model control."""

    def do_POST(self) -> None:
        allowed = self.headers.get("triton-omni-key") == "k"
        index = [{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "no"}, {"name": "n"}]
        if self.path == "/v2/repository/index":
            self.answer(200 if allowed else 403, index if allowed else {"error": "restricted"})
        else:
            self.answer(400, {"error": "failed to load"})

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/v2/health/live" else 400, None)

    def answer(self, status: int, value: object) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.HTTPServer((LOCAL, 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_api_against_a_server(port: int) -> None:
    api = Api(LOCAL, port, "k")
    assert api.is_live() and not api.is_ready()
    assert api.models() == {"m": ("UNAVAILABLE", "no"), "n": ("", "")}
    assert Api(LOCAL, port).models() == {}
    assert api.control("load", "m", 5.0) == "load m: failed to load"


def test_api_without_a_server() -> None:
    api = Api(LOCAL, free_ports().http)
    assert not api.is_live() and api.models() == {}
    assert "unload m: " in api.control("unload", "m", 1.0)


LOG = """I1129 15:41:09.0 1 server.cc:305] "Waiting for in-flight requests to complete."
E1129 15:41:45.4 1 server.cc:241] "CudaDriverHelper has not been initialized."
E1129 15:41:45.5 1 model_lifecycle.cc:642] "failed to load 'm' version 1: weights are missing"
| m     | 1       | UNAVAILABLE: weights are missing |
| good  | 1       | READY |
error: creating server: Internal - failed to load all models
"""


def test_a_servers_errors_are_picked_out_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_errors(log) == ""
    log.write_text(LOG)
    assert [line[:10] for line in log_errors(log).splitlines()] == ["E1129 15:4", "| m     | ", "error: cre"]
    log.write_text("I all is well\n")
    assert log_errors(log) == "I all is well"
