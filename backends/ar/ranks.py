# SPDX-License-Identifier: Apache-2.0
"""The processes of a tensor-parallel engine: they die with their worker, and it dies with any of them.

With more than one rank vLLM runs every rank in a process of its own (its multiprocess executor); the engine and its
scheduler stay in the worker. A rank that is gone leaves the others waiting in a collective call for ever, so the worker
ends at once, as if it had crashed itself: its stub ends every run with one error and starts it again.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

from backends.core.engine import OptionsError

log = logging.getLogger("triton_omni.ranks")

_PR_SET_PDEATHSIG = 1


def check_ranks(ranks: int, gpus: int | None, stage: str) -> None:
    """Raise OptionsError unless the stage has as many ranks as its instance has GPUs (None: it runs on a CPU)."""
    if gpus is not None and ranks != gpus:
        raise OptionsError(
            f"stage '{stage}': tensor_parallel_size is {ranks}, but an instance has {gpus} GPU(s); "
            f"set engine.tensor_parallel_size and gpus_per_instance to the same number"
        )


def die_with_worker() -> None:
    """Called in a rank: have the kernel kill this process when the worker's is gone, however it went."""
    worker = multiprocessing.parent_process()
    if worker is None:
        return  # the only rank lives in the worker itself
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != worker.pid:  # it went before the call
        os._exit(1)


def watch_ranks(executor: Any) -> None:
    """Called in the worker: end this process when one of the executor's ranks ends and was not told to."""
    if not hasattr(executor, "workers"):
        return  # the only rank lives in this process
    Thread(target=_watch, args=(executor,), name="rank-watch", daemon=True).start()


def _watch(executor: Any) -> None:
    ranks = [handle.proc for handle in executor.workers]
    gone = wait([rank.sentinel for rank in ranks])
    if getattr(executor, "shutting_down", False) and not executor.is_failed:
        return
    number = next(i for i, rank in enumerate(ranks) if rank.sentinel in gone)
    log.error("rank %d of %d died (exit code %s); the worker ends", number, len(ranks), ranks[number].exitcode)
    os._exit(1)
