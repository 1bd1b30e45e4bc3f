# SPDX-License-Identifier: Apache-2.0
"""The client installs by itself, without torch, and works: a fresh environment with the client's extra only."""

from __future__ import annotations

import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tests.kit.triton_server import RunningServer
from triton_omni.backends.supervisor.home import REPO

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


def test_a_fresh_environment_with_the_client_alone(toy_server: RunningServer, tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves its traces there and not in the checkout
    for name in ("backends", "client"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPO / name, source / name)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{source}[client]"],
        check=True,
        timeout=500,
        cwd=tmp_path,
    )
    answer = subprocess.run(
        [python, "-c", ASK, toy_server.grpc], check=True, timeout=60, cwd=tmp_path, capture_output=True, text=True
    )
    assert answer.stdout.splitlines() == ["w0 w1 w2 ", "heavy: []"]
    shown = subprocess.run(
        [tmp_path / "venv" / "bin" / "triton-omni", "--help"], timeout=60, capture_output=True, text=True, check=True
    )
    assert "chat" in shown.stdout
