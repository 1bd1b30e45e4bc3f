# SPDX-License-Identifier: Apache-2.0
"""First-fit allocator over one fixed range of bytes; pure bookkeeping, used for host and device memory alike."""

from __future__ import annotations

import bisect

ALIGN_BYTES = 4096  # a page: slots never share one, so a torn write cannot reach a neighbour


class Extents:
    """Free and used extents of `size` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]  # (offset, length), sorted, never adjacent
        self._used: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int | None:
        """Offset of a new extent of at least `nbytes`, or None if there is no room."""
        length = max(ALIGN_BYTES, -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES)
        for i, (offset, room) in enumerate(self._free):
            if room >= length:
                if room == length:
                    del self._free[i]
                else:
                    self._free[i] = (offset + length, room - length)
                self._used[offset] = length
                return offset
        return None

    def free(self, offset: int) -> None:
        """Give an extent back; KeyError if it is not in use."""
        length = self._used.pop(offset)
        i = bisect.bisect(self._free, (offset, 0))
        if i < len(self._free) and offset + length == self._free[i][0]:
            length += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            i -= 1
            start, before = self._free.pop(i)
            offset, length = start, length + before
        self._free.insert(i, (offset, length))
