# SPDX-License-Identifier: Apache-2.0
"""Which requests are admitted, wait, or are refused. Pure."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

from triton_omni.backends.core.errors import TooBusy

T = TypeVar("T")


class Admission(Generic[T]):
    """At most `max_live` admitted, at most `max_queue` waiting; higher priority first, then first come."""

    def __init__(self, max_live: int, max_queue: int) -> None:
        self.max_live = max_live
        self.max_queue = max_queue
        self.live: set[T] = set()
        self._queue: list[tuple[int, int, T]] = []
        self._order = itertools.count()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def join(self, entry: T, priority: int) -> None:
        """Queue an entry; raises TooBusy if it can neither start nor wait."""
        if len(self.live) + self.queued >= self.max_live + self.max_queue:
            raise TooBusy(
                f"{len(self.live)} requests are running and {self.queued} wait; try again later", "queue", 1.0
            )
        heapq.heappush(self._queue, (-priority, next(self._order), entry))

    def admit(self) -> list[T]:
        """Entries that may start now, best first."""
        started: list[T] = []
        while self._queue and len(self.live) < self.max_live:
            entry = heapq.heappop(self._queue)[2]
            self.live.add(entry)
            started.append(entry)
        return started

    def replace(self, old: T, new: T) -> None:
        """Put `new` into the place of an admitted entry."""
        self.live.remove(old)
        self.live.add(new)

    def leave(self, entry: T) -> None:
        """Forget an entry, whether it runs or waits."""
        if entry in self.live:
            self.live.discard(entry)
        else:
            self._queue = [waiting for waiting in self._queue if waiting[2] != entry]
            heapq.heapify(self._queue)
