# SPDX-License-Identifier: Apache-2.0
"""What doctor says of environments and processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from triton_omni.backends.supervisor.doctor import engine_line, usage, versions


def test_versions() -> None:
    assert versions(Path(sys.executable), "msgspec").startswith("msgspec 0.")
    assert "no-such-package" in versions(Path(sys.executable), "no-such-package")
    assert "/none/python" in versions(Path("/none/python"), "msgspec")


def test_usage() -> None:
    mine = usage("me", os.getpid(), 1.26, "ready")
    assert mine.rss_mb >= mine.pss_mb > 1 and mine.ready_s == 1.3 and mine.state == "ready"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(20)
    assert usage("it", gone.pid, 0.0, "ready").state == "gone"


def test_the_engine_line_says_which_build_and_what_the_machine_wants() -> None:
    assert "(cpu build)" in engine_line("cpu", 0) and "make setup" not in engine_line("cpu", 0)
    assert "2 GPU(s): make setup EXTRAS=cuda," in engine_line("cpu", 2)
    assert "make setup" not in engine_line("cuda", 1)
    assert "no GPU: make setup EXTRAS=cpu," in engine_line("cuda", 0)
