# SPDX-License-Identifier: Apache-2.0
"""Threads that talk to Triton, so that no loop ever waits for it.

A send takes 0.2-0.4 ms, most of it waiting for the server (transport.md §3); several threads overlap that. Each
call is bound to one thread, which keeps its responses in order.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import triton_python_backend_utils as pb

log = logging.getLogger("triton_omni.triton")

THREADS = 4
POLL_S = 0.02  # a client's departure is seen within this; a poll costs 50-70 us per call (transport.md §2)

MANY_CALLS = 100

Job = Callable[[], None]


class Senders:
    """A few threads, each with a queue of jobs."""

    def __init__(self, threads: int = THREADS) -> None:
        self._queues: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in range(threads)]
        self._next = itertools.cycle(self._queues)
        for i, jobs in enumerate(self._queues):
            threading.Thread(target=_work, args=(jobs,), name=f"sender-{i}", daemon=True).start()

    def queue(self) -> Callable[[Job], None]:
        """A way to hand over jobs that run one after the other."""
        return next(self._next).put

    def close(self) -> None:
        """End the threads when their queues are empty."""
        for jobs in self._queues:
            jobs.put(None)


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:  # Triton boundary: a response that cannot be sent must not end the thread for others
            log.exception("a response could not be sent")


class CancelWatch:
    """Polls the senders of open calls and reports, once, each whose client went away.

    Measured on 24.10: `is_cancelled()` during or after the send of FINAL kills the whole server (SIGSEGV in
    TRITONBACKEND_ResponseFactoryIsCancelled). So `forget` comes before every FINAL, and waits for a poll under way.
    """

    def __init__(self) -> None:
        self._watched: dict[pb.ResponseSender, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="cancel-watch", daemon=True).start()

    def watch(self, sender: pb.ResponseSender, gone: Callable[[], None]) -> None:
        """Call `gone` from the polling thread if the client of `sender` leaves."""
        with self._lock:
            self._watched[sender] = gone

    def forget(self, sender: pb.ResponseSender) -> None:
        """The call is about to end: once this returns, `sender` is never polled again."""
        with self._lock:
            self._watched.pop(sender, None)

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            senders = list(self._watched)
            for sender in senders:
                try:
                    gone = self._poll(sender)
                    if gone is not None:
                        gone()
                except Exception:  # Triton boundary: one call's trouble must not end the watch over others
                    log.exception("a call could not be asked for its cancellation")
                    self.forget(sender)
            if len(senders) > MANY_CALLS:
                time.sleep(POLL_S)  # keeps the share of a core bounded when very many calls are open

    def _poll(self, sender: pb.ResponseSender) -> Callable[[], None] | None:
        """The callback to make if the sender's client is gone."""
        with self._lock:  # one poll at a time under the lock: `forget` waits 0.1 ms, not for the whole round
            if sender in self._watched and sender.is_cancelled():
                return self._watched.pop(sender)
            return None
