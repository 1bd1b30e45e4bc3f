# SPDX-License-Identifier: Apache-2.0
"""A child process of set-up: all of its output in a log, the lines worth seeing shown, its failure explained."""

from __future__ import annotations

import errno
import os
import re
import shlex
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from triton_omni.backends.supervisor.errors import Problem, Say
from triton_omni.backends.supervisor.serve import processes

_SHOWN_CHARS = 110
_KEPT_LINES = 400
_STOP_S = 10.0
_MISLEADING = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would make a child Python find other packages than its own."""
    return {name: value for name, value in environ.items() if name not in _MISLEADING}


def explain(text: str, log: Path) -> Problem:
    """The problem behind a child's last words."""
    if "No space left on device" in text or f"[Errno {errno.ENOSPC}]" in text:
        return disk_full(log.parent)
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
    return Problem(f"{log.stem} failed: {last}", f"read {log}, then run set-up again; it goes on where it stopped")


def run(
    command: Sequence[str],
    log: Path,
    show: Callable[[str], object] = str,
    explained: Callable[[str, Path], Problem] = explain,
) -> str:
    """Run a child to its end; returns its last lines. `show` is called with every line. Raises Problem if it fails."""
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
        try:
            for line in child.stdout:
                sink.write(line)
                tail.append(line)
                show(line)
            child.wait()
        finally:  # after a Ctrl-C nothing of ours may go on: the next set-up may come at once
            child.stdout.close()
            processes.stop(child, _STOP_S)
    if child.returncode != 0:
        raise explained("".join(tail), log)
    return "".join(tail)


def lines_that(match: str, say: Say) -> Callable[[str], None]:
    """A `show` for `run` that says the lines that begin like the expression `match`, shortened."""
    pattern = re.compile(match)

    def show(line: str) -> None:
        if pattern.match(line):
            say(f"    {line.strip()[:_SHOWN_CHARS]}")

    return show


def disk_full(folder: Path) -> Problem:
    """What to say when there is no space left."""
    return Problem(
        f"the disk that holds {folder} is full",
        "free some space, or point TRITON_OMNI_HOME at a folder on a larger disk; set-up goes on where it stopped",
    )
