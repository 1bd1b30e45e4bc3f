# SPDX-License-Identifier: Apache-2.0
"""How child processes end with their parent, however it ends."""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable
from threading import Thread

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded here: `signal_on_parent_death` may run between fork and exec


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
