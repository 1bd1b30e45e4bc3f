# SPDX-License-Identifier: Apache-2.0
"""The supervisor's own interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from triton_omni.backends.config.paths import ENGINE_PYTHON_VARIABLE

TIMEOUT_S = 60.0


def test_an_engine_python_that_is_a_script_is_started_once(tmp_path: Path) -> None:
    starts, script = tmp_path / "starts", tmp_path / "bin" / "python"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho start >> {starts}\nexec {sys.executable} "$@"\n')
    script.chmod(0o700)
    command = [sys.executable, "-m", "triton_omni.backends.supervisor", "--help"]
    done = subprocess.run(
        command, env={**os.environ, ENGINE_PYTHON_VARIABLE: str(script)}, capture_output=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0
    assert starts.read_text().split() == ["start"]
