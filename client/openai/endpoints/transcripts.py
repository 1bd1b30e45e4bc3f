# SPDX-License-Identifier: Apache-2.0
"""What earlier spoken answers said, by audio id, so that a chat may refer to them. In memory, bounded, with an end."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable

LIFE_S = 3600
MOST = 10_000


class Transcripts:
    """Audio id → transcript until it expires."""

    def __init__(self, clock: Callable[[], float] = time.time, life_s: int = LIFE_S, most: int = MOST) -> None:
        self._clock = clock
        self._life_s = life_s
        self._most = most
        self._kept: OrderedDict[str, tuple[int, str]] = OrderedDict()

    @staticmethod
    def new_id() -> str:
        """An id for an answer's audio."""
        return f"audio_{uuid.uuid4().hex}"

    def keep(self, audio_id: str, transcript: str) -> int:
        """Keep a transcript; returns the second it expires at."""
        expires_at = int(self._clock()) + self._life_s
        self._kept[audio_id] = (expires_at, transcript)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return expires_at

    def find(self, audio_id: str) -> str | None:
        """The transcript; None if it never was or has expired."""
        expires_at, transcript = self._kept.get(audio_id, (0, ""))
        if expires_at <= self._clock():
            self._kept.pop(audio_id, None)
            return None
        return transcript
