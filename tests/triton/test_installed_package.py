# SPDX-License-Identifier: Apache-2.0
"""The wheel in empty environments: its client chats without torch, and its stubs serve without a checkout."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

from tests.kit.package_wheel import build_wheel, write_traps
from tests.kit.triton_server import RunningServer, running_server
from triton_omni.backends.supervisor.setup.self_check import ask_toy
from triton_omni.backends.supervisor.setup.steps import STUB_REQUIREMENTS

pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]

ASK = """
import importlib.util, sys
from triton_omni import Client
from triton_omni.backends.wire import short_form
with Client(sys.argv[1]) as client:
    print("".join(p.text or "" for p in client.generate("toy", short_form("hi", {"max_tokens": 3}, True))))
heavy = [name for name in ("torch", "vllm", "transformers", "diffusers") if importlib.util.find_spec(name)]
print("heavy:", heavy)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def installed(folder: Path, *requirements: str) -> Path:
    """The interpreter of a new environment with these requirements."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    subprocess.run(command, check=True, timeout=500, cwd=folder)
    return python


def output(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Standard output of a command that must succeed."""
    run = subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_client_chats_without_torch(toy_server: RunningServer, wheel: Path, tmp_path: Path) -> None:
    python = installed(tmp_path / "venv", f"triton-omni[client] @ {wheel.as_uri()}")
    write_traps(tmp_path)
    (tmp_path / "ask.py").write_text(ASK)
    assert output(python, "ask.py", toy_server.grpc, cwd=tmp_path).splitlines() == ["w0 w1 w2 ", "heavy: []"]
    command = python.parent / "triton-omni"
    chat = [command, "chat", "--triton", toy_server.grpc, "--model", "toy", "--max-tokens", "2", "hi"]
    assert output(*chat, cwd=tmp_path).startswith("w0 w1")


def test_the_package_serves_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    """Its own `repository` command wrote the models, and stubs and workers run the installed package alone."""
    python = installed(tmp_path / "venv", "-r", str(STUB_REQUIREMENTS), wheel.as_uri())
    repository = [python.parent / "triton-omni", "repository", "--pipeline", "toy", "--out", tmp_path / "models"]
    output(*repository, cwd=tmp_path, TRITON_OMNI_HOME=str(tmp_path / "home"), TRITON_OMNI_ENGINE_PYTHON="")
    environment = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "TRITON_OMNI_ENGINE_PYTHON": str(python),
        "TRITON_OMNI_HOME": str(tmp_path / "home"),
    }
    with running_server([tmp_path / "models" / "toy"], variables=environment) as server:
        assert ask_toy(server.api) == ""
        stub = server.instance("toy_tokens")
        for pid in (stub.pid, stub.worker_pid):
            assert str(python.parent) in Path(f"/proc/{pid}/environ").read_text()
        assert str(tmp_path / "venv") in Path(f"/proc/{stub.worker_pid}/cmdline").read_text()
