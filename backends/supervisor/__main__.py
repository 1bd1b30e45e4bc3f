# SPDX-License-Identifier: Apache-2.0
"""The commands `serve`, `demo`, `doctor` and `health`. Any Python starts it, the engine environment runs it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from triton_omni.backends.config.paths import ENGINE_PYTHON_VARIABLE
from triton_omni.backends.supervisor.errors import Problem
from triton_omni.backends.supervisor.home import find_home
from triton_omni.backends.supervisor.serve import run_folder as rundir
from triton_omni.backends.supervisor.setup import __main__ as setup

_MARK = "triton_omni_engine"
_HEALTH_AGE_S = 60.0  # a health file older than this was written by a supervisor that is stuck or gone


def main() -> int:
    """Run one command; returns the exit code."""
    use_engine_python()
    from triton_omni.backends.supervisor import demo, doctor
    from triton_omni.backends.supervisor.serve import command as serve

    parser = argparse.ArgumentParser(prog="triton_omni.backends.supervisor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve.add_arguments(commands.add_parser("serve", help="run the server until Ctrl-C"))
    commands.add_parser("demo", help="start a server, ask it, show what came; files in out/")
    commands.add_parser("doctor", help="check set-up, list running servers with memory and start-up seconds")
    commands.add_parser("health", help="exit code 0 if the server here is well")
    options = parser.parse_args()
    try:
        if options.command == "serve":
            return serve.serve(options, setup.say)
        if options.command == "demo":
            return demo.demo(setup.say)
        if options.command == "doctor":
            return doctor.doctor(setup.say)
        return health()
    except Problem as problem:
        setup.say(f"{options.command}: {problem}")
        return 1
    except KeyboardInterrupt:
        setup.say(f"{options.command}: interrupted")
        return 130


def use_engine_python() -> None:
    """Become the engine environment's Python, which has what a supervisor imports. Raises SystemExit without one."""
    engine = Path(os.environ.get(ENGINE_PYTHON_VARIABLE) or find_home().engine_python)
    if not engine.exists():
        raise SystemExit(f"no engine environment at {engine.parent.parent}\n  Way out: make setup")
    if _MARK in sys._xoptions or engine.parent.parent.samefile(sys.prefix):  # the mark: it may be a wrapper script
        return
    os.execv(engine, [str(engine), "-X", _MARK, "-m", "triton_omni.backends.supervisor", *sys.argv[1:]])


def health() -> int:
    """Print the state of this user's running servers; 0 if there is one and all are ready."""
    states: list[str] = []
    for run_dir in rundir.all_runs():
        found = rundir.read_json(run_dir.path / rundir.HEALTH_FILE)
        if found is None:
            continue
        stale = time.time() - float(found["at"]) > _HEALTH_AGE_S and found["state"] != "starting"
        state = "stale" if stale else str(found["state"])
        setup.say(f"{run_dir.path}: {state} {'; '.join(found['troubles'])}".rstrip())
        states.append(state)
    if not states:
        setup.say("no server of this user runs here")
    return 0 if states and all(state == "ready" for state in states) else 1


if __name__ == "__main__":
    sys.exit(main())
