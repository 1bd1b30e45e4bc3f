# SPDX-License-Identifier: Apache-2.0
"""What networks make of prompts and pictures before the first step, with the newest kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

Pieces = dict[Hashable, Callable[[], torch.Tensor]]
"""What a drawing needs before its first step, and how to compute it. A key holds all that its piece depends on, by
content."""


class Cache:
    """Tensors by key, the newest used, as many as `most_bytes` hold."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
        self.bytes = 0

    def get(self, key: Hashable) -> torch.Tensor | None:
        """The tensor kept under this key, if it still is."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: Hashable, found: torch.Tensor) -> None:
        """Keep `found` under a new key, and forget what was not used for longest until all fit; what never would fit
        is not kept."""
        assert key not in self._kept
        if found.nbytes > self._most_bytes:
            return
        self._kept[key] = found
        self.bytes += found.nbytes
        while self.bytes > self._most_bytes:
            self.bytes -= self._kept.popitem(last=False)[1].nbytes
