# SPDX-License-Identifier: Apache-2.0
"""Transcripts of earlier spoken answers by audio id, so that a chat may refer to them. In memory, bounded, expiring."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable

LIFE_S = 3600
MAX_TRANSCRIPTS = 10_000


class Transcripts:
    """Audio id → transcript until it expires."""

    def __init__(
        self, clock: Callable[[], float] = time.time, life_s: int = LIFE_S, limit: int = MAX_TRANSCRIPTS
    ) -> None:
        self._clock = clock
        self._life_s = life_s
        self._limit = limit
        self._kept: OrderedDict[str, tuple[int, str]] = OrderedDict()

    @staticmethod
    def new_id() -> str:
        """An id for an answer's audio."""
        return f"audio_{uuid.uuid4().hex}"

    def keep(self, audio_id: str, transcript: str) -> int:
        """Keep a transcript; returns when it expires, in seconds since the epoch."""
        expires_at = int(self._clock()) + self._life_s
        self._kept[audio_id] = (expires_at, transcript)
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)
        return expires_at

    def find(self, audio_id: str) -> str | None:
        """The transcript; None if it is unknown or has expired."""
        expires_at, transcript = self._kept.get(audio_id, (0, ""))
        if expires_at <= self._clock():
            self._kept.pop(audio_id, None)
            return None
        return transcript
