# SPDX-License-Identifier: Apache-2.0
"""Threads for what would hold up the event loop, apart by kind: slow work of one kind delays no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Pools:
    """Small on purpose: what waits in a queue is cheap, and what is at work holds memory and cannot be stopped.

    names    look-ups of hosts; a resolver can be silent for half a minute
    films    decoding of films; each takes up to half a minute and 240 MB
    media    decoding of pictures and sounds
    answers  encoding of pictures and speech
    """

    def __init__(self) -> None:
        self.names = ThreadPoolExecutor(16, "names")
        self.films = ThreadPoolExecutor(2, "films")
        self.media = ThreadPoolExecutor(4, "media")
        self.answers = ThreadPoolExecutor(4, "answers")

    def close(self) -> None:
        """Take no more work, and drop what has not begun."""
        for pool in (self.names, self.films, self.media, self.answers):
            pool.shutdown(wait=False, cancel_futures=True)


async def in_thread(pool: ThreadPoolExecutor, work: Callable[..., T], *given: object) -> T:
    """The result of `work(*given)`, done in a thread of the pool. A caller that is cancelled no longer waits for it."""
    return await asyncio.get_running_loop().run_in_executor(pool, work, *given)
