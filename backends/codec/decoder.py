# SPDX-License-Identifier: Apache-2.0
"""What the codec engine needs of a decoder of codes to audio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(slots=True)
class Window:
    """A piece of one run's codes: `take` frames to decode, with frames of context on both sides.

    codes   (frames, codes) int16; rows `left` to `left + take` become audio
    start   number of the first row in the run, from 0
    left    rows of context in front; fewer than the decoder's `left` only where the run begins
    final   no frame follows the last row; otherwise there are the decoder's `right` rows of context behind
    state   the decoder's own, from `Decoder.start`; it may change it
    """

    codes: np.ndarray
    start: int
    left: int
    take: int
    final: bool
    state: Any

    @property
    def right(self) -> int:
        """Rows of context behind."""
        return len(self.codes) - self.left - self.take


class Decoder(Protocol):
    """Turns windows into audio; cutting a run into windows makes no audible difference."""

    codes: int
    """Codes per frame."""
    left: int
    right: int
    """Frames of context a window needs in front and behind."""
    samples_per_frame: int
    sample_rate_hz: int

    def start(self) -> Any:
        """The state of a new run."""
        ...

    def check(self, codes: np.ndarray) -> None:
        """Raise BadRequest for codes that stand for nothing."""
        ...

    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        """Float32 samples of each window, `take * samples_per_frame` of them; all windows in one pass."""
        ...
