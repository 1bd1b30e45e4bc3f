# SPDX-License-Identifier: Apache-2.0
"""The processes of a tensor-parallel engine: they die with their worker, and it dies with any of them.

With more than one rank vLLM runs every rank in a process of its own (its multiprocess executor); the engine and its
scheduler stay in the worker. A rank that is gone leaves the others waiting in a collective call forever, so the worker
ends at once, as if it had crashed itself: its stub ends every run with one error and starts it again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any

from triton_omni.backends.child_process import signal_on_parent_death
from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.errors import describe

log = logging.getLogger("triton_omni.ranks")

_REASONS = "TRITON_OMNI_RANK_REASONS"
"""Variable that names the folder where ranks write why they could not load."""


def check_ranks(ranks: int, gpus: int | None, stage: str) -> None:
    """Raise OptionsError unless the stage has as many ranks as its instance has GPUs (None: it runs on a CPU)."""
    if gpus is not None and ranks != gpus:
        raise OptionsError(
            f"stage '{stage}': tensor_parallel_size is {ranks}, but an instance has {gpus} GPU(s); "
            f"set engine.tensor_parallel_size and gpus_per_instance to the same number"
        )


def is_only_rank() -> bool:
    """True in the worker's own process: no other computes the same there."""
    return multiprocessing.parent_process() is None


def die_with_worker() -> None:
    """Called in a rank: have the kernel kill this process when the worker's is gone, however it went.

    It has nothing to put in order, so it also ends at once when it is asked to; vLLM's own way takes 5 to 10 s.
    """
    worker = multiprocessing.parent_process()
    if worker is None:
        return  # the only rank lives in the worker itself
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != worker.pid:  # it went before the call
        os._exit(1)


@contextmanager
def die_on_error(rank: int) -> Iterator[None]:
    """Around a rank's part of a step. vLLM goes on after an error of one rank, while the others wait in the collective
    call that it left out, or take its next one for it: the process ends instead, and the worker with it."""
    try:
        yield
    except Exception:
        if is_only_rank():
            raise
        log.exception("rank %d cannot take part in a step any more", rank)
        os._exit(1)


@contextmanager
def reasons_of_ranks(stage: str) -> Iterator[None]:
    """Around loading, in the worker: what stops a rank is raised in its words; vLLM only says that something did."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        os.environ[_REASONS] = folder
        try:
            yield
        except Exception as error:
            reasons = [f"{path.name}: {path.read_text(encoding='utf-8')}" for path in sorted(Path(folder).iterdir())]
            if not reasons:
                raise
            raise OptionsError(f"stage '{stage}', {reasons[0]}") from error
        finally:
            del os.environ[_REASONS]


@contextmanager
def tell_reason(rank: int) -> Iterator[None]:
    """Around a part of loading, in a rank."""
    try:
        yield
    except Exception as error:
        if _REASONS in os.environ:  # with one rank the error itself gets there
            reason = Path(os.environ[_REASONS], f"rank {rank}")
            reason.write_text(describe(error), encoding="utf-8")
        raise


def unlink_shared_memory() -> None:
    """Called in a rank when all have met: take away the names of vLLM's all-reduce on CPUs.

    Every rank has mapped them by now, and a rank that is killed could not.
    """
    group = os.environ.get("VLLM_DIST_IDENT")
    if group:
        for path in Path("/dev/shm").glob(f"{group}-*-cpushm_*"):
            path.unlink(missing_ok=True)


def watch_ranks(executor: Any) -> None:
    """Called in the worker: end this process when one of the executor's ranks ends without being asked to."""
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
