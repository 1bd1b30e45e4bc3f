# SPDX-License-Identifier: Apache-2.0
"""Thread pools for blocking work, one per kind: slow work of one kind does not delay another."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from triton_omni.media import is_large

T = TypeVar("T")
LARGE_NICENESS = 10


class Pools:
    """Small on purpose: queued work is cheap; running work holds memory and cannot be stopped.

    names    host name look-ups; a resolver can be silent for half a minute
    large    decoding of videos, large images and long audio, each up to half a minute and 240 MB; at low priority
    media    decoding of other images and audio, parsing of large bodies
    answers  encoding of images and audio
    """

    def __init__(self) -> None:
        self.names = ThreadPoolExecutor(16, "names")
        self.large = ThreadPoolExecutor(2, "large", _lower_priority)
        self.media = ThreadPoolExecutor(4, "media")
        self.answers = ThreadPoolExecutor(4, "answers")

    async def decode(self, decode: Callable[[bytes], T], data: bytes, *, is_video: bool = False) -> T:
        """`decode(data)` in a thread: large content never delays small content. Raises what `decode` raises."""
        pool = self.large if is_video or await in_thread(self.media, is_large, data) else self.media
        return await in_thread(pool, decode, data)

    def close(self) -> None:
        """Accept no more work, and drop what has not started."""
        for pool in (self.names, self.large, self.media, self.answers):
            pool.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
    """Let the event loop and small requests go first on the CPU. Linux counts priorities per thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LARGE_NICENESS)


async def in_thread(pool: ThreadPoolExecutor, function: Callable[..., T], *args: object) -> T:
    """The result of `function(*args)`, run in a thread of the pool. A cancelled caller stops waiting for it."""
    return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
