# SPDX-License-Identifier: Apache-2.0
"""Thread pools for blocking work, one per kind: slow work of one kind does not delay another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Pools:
    """Small on purpose: queued work is cheap; running work holds memory and cannot be stopped.

    names    host name look-ups; a resolver can be silent for half a minute
    videos   decoding of videos; each takes up to half a minute and 240 MB
    media    decoding of images and audio, parsing of large bodies
    answers  encoding of images and audio
    """

    def __init__(self) -> None:
        self.names = ThreadPoolExecutor(16, "names")
        self.videos = ThreadPoolExecutor(2, "videos")
        self.media = ThreadPoolExecutor(4, "media")
        self.answers = ThreadPoolExecutor(4, "answers")

    def close(self) -> None:
        """Accept no more work, and drop what has not started."""
        for pool in (self.names, self.videos, self.media, self.answers):
            pool.shutdown(wait=False, cancel_futures=True)


async def in_thread(pool: ThreadPoolExecutor, function: Callable[..., T], *args: object) -> T:
    """The result of `function(*args)`, run in a thread of the pool. A cancelled caller stops waiting for it."""
    return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
