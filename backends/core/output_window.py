# SPDX-License-Identifier: Apache-2.0
"""How far ahead of its client a stream may send. Pure; decision 0011 has the reasons and the measurements.

Triton takes every response at once, whether its client reads or not, so what waits for a slow client is memory of the
server. A client that acknowledges says what it has read; any other client is assumed to read at a fixed pace.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

RESPONSE_BYTES = 2048
"""Charged per response on top of its payload: the event, and Triton's and gRPC's objects around it."""
JSON_EXPANSION = 5
"""Bytes of JSON per byte of a tensor, as `/generate_stream` sends it."""
FIRST_SHARE = 1 / 8
"""Share of the window that is open before the client has acknowledged anything; each acknowledgment doubles it.

A client that never reads costs this much, and its stream stops taking time from others as soon as it is full.
"""
MARKS = 4
"""Acknowledgments asked for per open window."""
BURST = 0.25
"""Share of the window that a client without acknowledgments is sent ahead of its pace."""
PACE_S = 64.0
"""Seconds in which such a client is assumed to read one window of text."""


@dataclass(eq=False, slots=True)
class OutputWindow:
    """Bytes sent and not known to be read, at most `open_bytes`; a single larger piece passes alone.

    limit_bytes   most that the window opens to
    acknowledges  the client acknowledges what it has read
    expansion     factor on the payload where Triton sends it as JSON text
    sent_bytes    of all responses so far
    read_bytes    of them that the client has read, as far as is known or assumed
    marked_bytes  `sent_bytes` at the latest response that asked for an acknowledgment
    open_bytes    the window now
    """

    limit_bytes: int
    acknowledges: bool
    expansion: int = 1
    sent_bytes: int = 0
    read_bytes: float = 0.0
    marked_bytes: int = 0
    open_bytes: float = 0.0
    _marks: dict[str, int] = field(default_factory=dict[str, int])
    _pace: float = 0.0
    _paced_s: float | None = None

    def __post_init__(self) -> None:
        self._pace = self.limit_bytes / PACE_S
        self.open_bytes = self.limit_bytes * (FIRST_SHARE if self.acknowledges else BURST)

    def has_room(self, nbytes: int) -> bool:
        """True if a response of `nbytes` payload may leave now."""
        unread = self.sent_bytes - self.read_bytes
        small = unread < self.open_bytes / MARKS  # above this an acknowledgment is under way
        return small or unread + self._cost(nbytes) <= self.open_bytes

    def send(self, nbytes: int, playback_s: float = 0.0) -> str:
        """Count a response of `nbytes` payload; returns the mark that its reader has to send back, or "".

        Marks are random: a client that has not read a response cannot acknowledge it.
        """
        self.sent_bytes += self._cost(nbytes)
        if nbytes:  # an image takes a second per window, audio its playing time
            self._pace = max(self._pace, nbytes * self.expansion / playback_s if playback_s else self.limit_bytes)
        if not self.acknowledges or self.sent_bytes - self.marked_bytes < self.open_bytes / MARKS:
            return ""
        self.marked_bytes = self.sent_bytes
        mark = secrets.token_hex(8)
        self._marks[mark] = self.sent_bytes
        return mark

    def acknowledge(self, mark: str) -> bool:
        """The client has read the response with this mark, and so all before it; False if it acknowledges nothing."""
        if mark not in self._marks:
            return False
        self.read_bytes = self._marks[mark]
        self.open_bytes = min(self.limit_bytes, 2 * self.open_bytes)
        self._marks = {later: count for later, count in self._marks.items() if count > self.read_bytes}
        return True

    def elapse(self, now_s: float) -> None:
        """Let a client that does not acknowledge read at its pace up to `now_s`."""
        if self._paced_s is not None:
            self.read_bytes = min(self.sent_bytes, self.read_bytes + (now_s - self._paced_s) * self._pace)
        self._paced_s = now_s

    def _cost(self, nbytes: int) -> int:
        return nbytes * self.expansion + RESPONSE_BYTES
