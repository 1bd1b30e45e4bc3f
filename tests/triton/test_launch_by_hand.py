# SPDX-License-Identifier: Apache-2.0
"""The tritonserver command that the launcher prints works when a person types it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.kit.triton_server import TOY_REPOSITORY, wait_for
from triton_omni.backends.supervisor.home import find_home
from triton_omni.backends.supervisor.serve import processes, run_folder
from triton_omni.backends.supervisor.serve.launch import Launch, free_ports
from triton_omni.backends.supervisor.serve.locate import find_server
from triton_omni.backends.supervisor.setup.self_check import ask_toy

pytestmark = [pytest.mark.triton, pytest.mark.timeout(120)]


def test_the_printed_command_serves(tmp_path: Path) -> None:
    run_dir = run_folder.make()
    launch = Launch(find_server(find_home()), [TOY_REPOSITORY], free_ports(), run_dir, key="k", exit_timeout_s=10)
    with (tmp_path / "log").open("wb") as log:
        command = f"exec {launch.by_hand()}"
        child = subprocess.Popen(["bash", "-c", command], cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: launch.api().is_ready(1.0) or child.poll() is not None, 60, "ready")
            assert ask_toy(launch.api()) == "", (tmp_path / "log").read_text()
        finally:
            assert processes.stop(child, 30)
            run_dir.remove()
