# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator needs from the world: a way to answer one client, and a way to open a stage's run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.errors import OmniError
from triton_omni.backends.wire import Event


@dataclass(frozen=True, slots=True)
class Response:
    """One response for a client: an event, and the tensors it is about."""

    event: Event
    tensors: tuple[Tensor, ...] = ()


class ResponseSink(Protocol):
    """One client's call. Calls never block; pieces leave in the order given."""

    def bind(self, run: bytes) -> None:
        """Learn the run's id, under which the client's departure is reported."""
        ...

    def send(self, piece: Response, sent: Callable[[], None] | None) -> None:
        """Send one response. `sent` is called from another thread when its tensors are no longer needed."""
        ...

    def publish(self) -> None:
        """Bring the server's metrics up to date; only before the call's end is sent."""
        ...

    def end(self, piece: Response) -> None:
        """Send the last response and close the call, in one."""
        ...

    def fail(self, error: OmniError) -> None:
        """Answer with an error and close the call, in one."""
        ...


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A run to open at the stage model `model`; `inputs` is passed through to the port as it came in."""

    model: str
    message: bytes
    inputs: Any
    tensor_names: tuple[str, ...]


class Opener(Protocol):
    """Opens runs through Triton, one at a time; answers are posted to the orchestrator's hub by the callbacks."""

    @property
    def stuck(self) -> bool:
        """True if a call has been under way for so long that it will not return: nothing can be opened any more."""
        ...

    def open(self, call: OpenCall, opened: Callable[[Any], None], failed: Callable[[OmniError], None]) -> None:
        """Open a run. `opened` gets a handle that must be closed once, or buried and perhaps closed later."""
        ...

    def close(self, handle: Any) -> None:
        """Let go of a run whose Triton side has ended; also of one that was buried."""
        ...

    def bury(self, handle: Any) -> None:
        """Put away the handle of a run whose stage died: its stream may never end, so it is not touched meanwhile."""
        ...
