# SPDX-License-Identifier: Apache-2.0
"""Child processes: their environment variables, and their end with their parent. Standard library only."""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable, Mapping
from threading import Thread

INTERPRETER_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that make a Python find the packages of another environment."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded here: `signal_on_parent_death` may run between fork and exec


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that lead a Python to another environment's packages."""
    return {name: value for name, value in environ.items() if name not in INTERPRETER_VARIABLES}


def signal_on_parent_death(number: int) -> None:
    """Called in a child: the kernel sends it signal `number` when its parent's thread ends, for whatever reason."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def exit_with_peer(fd: int, before_exit: Callable[[], object] = lambda: None) -> None:
    """End this process when the other end of the socket `fd` closes, also while the main thread is in a long call."""

    def watch() -> None:
        poller = select.poll()
        poller.register(fd, select.POLLHUP | select.POLLRDHUP)
        poller.poll()
        before_exit()
        os._exit(0)

    Thread(target=watch, name="exit-with-peer", daemon=True).start()
