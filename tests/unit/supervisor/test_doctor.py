# SPDX-License-Identifier: Apache-2.0
"""What doctor says of environments and processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from triton_omni.backends.control.records import InstanceRecord, write_record
from triton_omni.backends.supervisor.doctor import engine_line, show_server, usage, versions
from triton_omni.backends.supervisor.serve import run_folder
from triton_omni.backends.supervisor.serve.run_folder import RunDir


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


def test_a_running_server_is_shown_with_the_paths_of_its_gpu_tensors(tmp_path: Path) -> None:
    pid = os.getpid()
    facts = {"host": "127.0.0.1", "http_port": 1, "grpc_port": 2, "openai_port": 0, "ready_s": 3.0}
    facts |= {"supervisor_pid": pid, "proxy_pid": 0, "server_pid": pid}
    (tmp_path / run_folder.FACTS_FILE).write_text(json.dumps(facts))
    (tmp_path / run_folder.HEALTH_FILE).write_text(json.dumps({"state": "ready", "problems": []}))
    for stage, gpu_paths in (("thinker", "omni/talker: GPU memory"), ("talker", "")):
        write_record(
            tmp_path,
            InstanceRecord(
                model=f"omni_{stage}", instance="0", role="stage", pid=pid, start_time=1, state="ready",
                worker_pid=pid, gpu_paths=gpu_paths,
            ),
        )  # fmt: skip
    lines: list[str] = []
    assert show_server(RunDir(tmp_path, "mark", pid, 1), lines.append)
    assert [line.strip() for line in lines if "GPU" in line] == [
        "GPU tensors of omni_thinker#0 to omni/talker: GPU memory"
    ]
