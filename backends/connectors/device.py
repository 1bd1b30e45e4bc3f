# SPDX-License-Identifier: Apache-2.0
"""Which way the GPU tensors of one link take: through a slab of GPU memory that both ends map, or through the host.

The way is decided per link and direction, and logged once. The first GPU tensor of a link makes its sender allocate
a slab and announce it; the peer opens the slab and answers, or answers why it cannot. Until that answer, and
whenever the slab has no room, GPU tensors are copied to host memory and travel like any other tensor. No failure of
CUDA's inter-process memory ends a link.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from triton_omni.backends.core.chunk import Tensor, TensorSpec

log = logging.getLogger("triton_omni.connectors")

State = Literal["host", "allowed", "announced", "shared"]


class DeviceStore(Protocol):
    """A slab of device memory shared with the peer; implemented by cuda_ipc.DeviceSlab.

    Calls of CUDA that fail raise RuntimeError with the error's name.
    """

    def announce(self) -> bytes:
        """Allocate the slab and return what the peer needs to open it."""
        ...

    def attach(self, announcement: bytes) -> None:
        """Open the peer's slab; RuntimeError says why that is not possible, ValueError that it is malformed."""
        ...

    def alloc(self, nbytes: int) -> int | None: ...
    def free(self, offset: int) -> None: ...
    def write(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Copy GPU tensors to offsets of the slab; complete on return."""
        ...

    def read(self, offset: int, spec: TensorSpec) -> Tensor:
        """A view into the peer's slab, valid until its chunk is released; ValueError if it is not in the slab."""
        ...

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors in host memory, valid until the next call."""
        ...

    def settle(self) -> None:
        """Wait until reads of the peer's slab queued so far are done; called before an acknowledgement."""
        ...

    def close(self, peer_closed: bool) -> None:
        """Unmap the peer's slab; free ours if the peer has unmapped it (`peer_closed`) or never mapped it."""
        ...


class DevicePath:
    """One link's device store and the state of its negotiation, for the tensors that this end sends.

    shares  False for a link to another host: its GPU tensors go through host memory, pinned by the store
    """

    def __init__(self, store: DeviceStore, shares: bool = True) -> None:
        self.store = store
        self._shares = shares
        self.state: State = "host"
        self.reason = "the peer has not named its GPU yet"
        self.peer_has_gpu = False
        self._peer_name = "the peer"

    def meet(self, peer_name: str, gpu_uuid: str, peer_gpu_uuid: str) -> None:
        """Compare the GPUs of both ends, as their Hello messages name them."""
        self._peer_name, self.peer_has_gpu = peer_name or self._peer_name, bool(peer_gpu_uuid)
        if not self._shares:
            self._use_host("the link is TCP")
        elif not peer_gpu_uuid or not gpu_uuid:
            self._use_host("the peer has no GPU memory to share" if gpu_uuid else "this GPU's memory cannot be shared")
        elif peer_gpu_uuid != gpu_uuid:
            self._use_host("the peer is on another GPU")
        else:
            self.state, self.reason = "allowed", "nothing was announced yet"

    @property
    def summary(self) -> str:
        """The path of GPU tensors to this peer and its reason, in one line."""
        path = "host memory" if self.state == "host" else "GPU memory"
        return f"{self._peer_name}: {path} ({self.reason})" if self.reason else f"{self._peer_name}: {path}"

    def announcement(self) -> bytes | None:
        """What to send to the peer before the first GPU tensor; None if nothing is to be announced now."""
        if self.state != "allowed":
            return None
        try:
            announcement = self.store.announce()
        except RuntimeError as error:
            self._use_host(f"no slab of GPU memory ({error})")
            return None
        self.state, self.reason = "announced", "the peer has not answered yet"
        return announcement

    def attach(self, announcement: bytes) -> str:
        """Open the slab that the peer announced; returns why it cannot be opened, or ""."""
        try:
            self.store.attach(announcement)
        except RuntimeError as error:
            log.warning("link to %s: its GPU memory cannot be opened (%s)", self._peer_name, error)
            return str(error) or type(error).__name__
        return ""

    def on_answer(self, refusal: str) -> None:
        """The peer's answer to our announcement; raises ValueError if there was none."""
        if self.state != "announced":
            raise ValueError("an answer to no announcement")
        if refusal:
            self._use_host(f"the peer cannot open it: {refusal}")
        else:
            self.state, self.reason = "shared", ""
            log.info("link to %s: GPU tensors stay in GPU memory", self._peer_name)

    def alloc(self, nbytes: int) -> int | None:
        """Room in the slab; None if these tensors go through the host."""
        return self.store.alloc(nbytes) if self.state == "shared" else None

    def close(self, peer_closed: bool) -> None:
        """End of the link. `peer_closed`: its end is closed, so it has unmapped our slab."""
        self.store.close(peer_closed or self.state not in ("announced", "shared"))
        self.state, self.reason = "host", "the link is closed"

    def _use_host(self, reason: str) -> None:
        self.state, self.reason = "host", reason
        log.info("link to %s: GPU tensors go through host memory: %s", self._peer_name, reason)
