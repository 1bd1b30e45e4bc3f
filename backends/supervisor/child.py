# SPDX-License-Identifier: Apache-2.0
"""A child process of set-up: all of its output in a log, the lines worth seeing shown as they come."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from backends.supervisor.problem import Problem
from backends.supervisor.stamps import Say

NOTHING = re.compile(r"(?!)")
_SHOWN_CHARS = 110
_KEPT_LINES = 400
_MISLEADING = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would make a child Python find other packages than its own."""
    return {name: value for name, value in environ.items() if name not in _MISLEADING}


def follow(command: Sequence[str], log: Path, say: Say, shown: re.Pattern[str] = NOTHING) -> tuple[int, str]:
    """Run a child to its end; returns its exit code and its last lines. Lines that match `shown` are shown."""
    log.parent.mkdir(parents=True, exist_ok=True)
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("a") as sink:
        sink.write(f"$ {shlex.join(command)}\n")
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**clean_environment(os.environ), **settings},
        )
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                sink.write(line)
                tail.append(line)
                if shown.match(line):
                    say(f"    {line.strip()[:_SHOWN_CHARS]}")
        return child.wait(), "".join(tail)


def disk_full(folder: Path) -> Problem:
    """What to say when there is no space left."""
    return Problem(
        f"the disk that holds {folder} is full",
        "free some space, or point TRITON_OMNI_HOME at a folder on a larger disk; set-up goes on where it stopped",
    )
