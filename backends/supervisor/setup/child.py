# SPDX-License-Identifier: Apache-2.0
"""Child processes of set-up: all output goes to a log, selected lines are shown, failures become SetupErrors."""

from __future__ import annotations

import errno
import os
import re
import shlex
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from triton_omni.backends.child_process import clean_environment
from triton_omni.backends.supervisor.errors import Report, SetupError
from triton_omni.backends.supervisor.serve import processes

_SHOWN_CHARS = 110
_KEPT_LINES = 400
_STOP_S = 10.0


def explain(text: str, log: Path) -> SetupError:
    """The error behind the last lines of a child's output."""
    if "No space left on device" in text or f"[Errno {errno.ENOSPC}]" in text:
        return disk_full(log.parent)
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
    return SetupError(
        f"{log.stem} failed: {last}", hint=f"read {log}, then run set-up again; it continues where it stopped"
    )


def run(
    command: Sequence[str],
    log: Path,
    show: Callable[[str], object] = str,
    explained: Callable[[str, Path], SetupError] = explain,
) -> str:
    """Run a child to its end; returns its last lines. Calls `show` with every line. Raises SetupError if it fails."""
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
        finally:  # after a Ctrl-C the child must end: the next set-up may start at once
            child.stdout.close()
            processes.stop(child, _STOP_S)
    if child.returncode != 0:
        raise explained("".join(tail), log)
    return "".join(tail)


def lines_that(match: str, report: Report) -> Callable[[str], None]:
    """A `show` for `run` that reports lines matching the regular expression `match`, shortened."""
    pattern = re.compile(match)

    def show(line: str) -> None:
        if pattern.match(line):
            report(f"    {line.strip()[:_SHOWN_CHARS]}")

    return show


def disk_full(folder: Path) -> SetupError:
    """The error for a full disk."""
    return SetupError(
        f"the disk that holds {folder} is full",
        hint="free some space, or set TRITON_OMNI_HOME to a folder on a larger disk; set-up continues where it stopped",
    )
