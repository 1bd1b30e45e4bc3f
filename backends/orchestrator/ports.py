# SPDX-License-Identifier: Apache-2.0
"""How the orchestrator opens a stage's run through Triton. A client's call is a `core.responses.ResponseStream`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.errors import OmniError


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A run to open at the stage model `model`, with the request's tensors that the stage takes.

    is_fed  the run waits for another stage's output, so that it may be opened a little later than those that do not
    """

    model: str
    message: bytes
    inputs: Mapping[str, Tensor]
    is_fed: bool = False


class Opener(Protocol):
    """Opens runs through Triton, one at a time; the callbacks are called from another thread."""

    @property
    def stuck(self) -> bool:
        """True if a call takes so long that it will not return: nothing can be opened until a restart."""
        ...

    def open(self, call: OpenCall, opened: Callable[[object], None], failed: Callable[[OmniError], None]) -> None:
        """Open a run. `opened` gets a handle that must be closed once, or abandoned and perhaps closed later."""
        ...

    def close(self, handle: object) -> None:
        """Let go of a run whose Triton side has ended; also of one that was abandoned."""
        ...

    def abandon(self, handle: object) -> None:
        """Set aside the handle of a run whose stage died: its stream may never end, so it is not read meanwhile."""
        ...
