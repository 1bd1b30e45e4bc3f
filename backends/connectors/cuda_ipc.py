# SPDX-License-Identifier: Apache-2.0
"""Tensors between two processes on one GPU without a copy through the host.

One device slab per link and direction: one cudaMalloc by the producer, announced once with its IPC handle, opened
once by the peer, then offsets per chunk. Between two stages on one GPU a tensor is copied once, device to device.
Where the peer has another GPU or none, chunks go through pinned host memory into the shared-memory slab; which
way it is, is decided by the Hello of both ends (they compare GPU UUIDs).

Ordering: the copy into the slab is complete before the descriptor is sent, and the consumer's reads are complete
before the acknowledgement; both by synchronising the default stream, which is where engines must leave tensors.
Lifetime: the slab is freed when the link closes. A peer that still has it mapped then loses the mapping with its
own end of the link, which it sees at the same moment.

Needs cuda-python. No CPU twin lives here: shm.py without a device store is it, and both pass the same contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from triton_omni.backends.connectors.base import PeerLost
from triton_omni.backends.connectors.slab import Extents
from triton_omni.backends.core.chunk import Tensor, TensorSpec

DEVICE_SLAB_BYTES = 256 << 20  # a few hundred thinker rows of a 30B model, or one second of code2wav latents
_TYPESTR = {
    "bool": "|b1", "uint8": "|u1", "int8": "|i1", "int16": "<i2", "uint16": "<u2", "float16": "<f2",
    "bfloat16": "<u2",  # the interface has no bfloat16; consumers view the bits as `spec.dtype` says
    "int32": "<i4", "uint32": "<u4", "float32": "<f4", "int64": "<i8", "uint64": "<u8", "float64": "<f8",
}  # fmt: skip


class Announcement(msgspec.Struct, array_like=True, frozen=True):
    """How a peer opens our slab."""

    handle: bytes
    gpu_uuid: str
    nbytes: int


@dataclass(frozen=True)
class DeviceView:
    """Device memory that belongs to someone else, for `torch.as_tensor(view, device="cuda")`."""

    pointer: int
    spec: TensorSpec

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": tuple(self.spec.shape),
            "typestr": _TYPESTR[self.spec.dtype],
            "data": (self.pointer, True),
            "strides": None,
            "version": 3,
            "stream": 1,  # the legacy default stream
        }


def gpu_uuid(device: int = 0) -> str:
    """UUID of a visible GPU whose memory other processes can open; "" where there is none."""
    try:
        runtime = _runtime()
        count = _check(runtime.cudaGetDeviceCount())
        can_share = runtime.cudaDeviceAttr.cudaDevAttrIpcEventSupport  # CUDA's manual names it as the test
        if device >= count or not _check(runtime.cudaDeviceGetAttribute(can_share, device)):
            return ""
    except (ImportError, RuntimeError):
        return ""
    return _check(runtime.cudaGetDeviceProperties(device)).uuid.bytes.hex()


def device_slab() -> DeviceSlab | None:
    """A new link's slab; None without CUDA's binding, so that it is the engine that says what is missing."""
    try:
        return DeviceSlab()
    except ImportError:
        return None


class DeviceSlab:
    """One link's device memory, ours and the peer's; implements shm.DeviceStore."""

    def __init__(self, device: int = 0, nbytes: int = DEVICE_SLAB_BYTES) -> None:
        self._runtime = _runtime()
        self._device = device
        self._extents = Extents(nbytes)
        self._pointer = 0
        self._announced = False
        self._peer_pointer = 0
        self._pinned = 0
        self._pinned_bytes = 0

    # --- producer --------------------------------------------------------------------------------------------------
    def alloc(self, nbytes: int) -> int | None:
        if not self._pointer:
            _check(self._runtime.cudaSetDevice(self._device))
            self._pointer = int(_check(self._runtime.cudaMalloc(self._extents.size)))
        return self._extents.alloc(nbytes)

    def write(self, offset: int, tensor: Tensor) -> None:
        """Copy a GPU tensor to `offset`; complete on return."""
        if tensor.spec.nbytes:
            kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
            _check(self._runtime.cudaMemcpy(self._pointer + offset, _pointer_of(tensor), tensor.spec.nbytes, kind))
            _check(self._runtime.cudaStreamSynchronize(0))  # a device-to-device copy returns before it is done

    def publish(self) -> bytes | None:
        if self._announced:
            return None
        self._announced = True
        handle = _check(self._runtime.cudaIpcGetMemHandle(self._pointer))
        return msgspec.msgpack.encode(Announcement(bytes(handle.reserved), gpu_uuid(self._device), self._extents.size))

    def free(self, offset: int) -> None:
        self._extents.free(offset)

    def to_host(self, tensor: Tensor) -> Tensor:
        """The same tensor in host memory, copied through a pinned buffer."""
        import ctypes

        nbytes = tensor.spec.nbytes
        if nbytes > self._pinned_bytes:
            self._free_pinned()
            self._pinned = int(_check(self._runtime.cudaMallocHost(nbytes)))
            self._pinned_bytes = nbytes
        if nbytes:
            kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
            _check(self._runtime.cudaMemcpy(self._pinned, _pointer_of(tensor), nbytes, kind))
        return Tensor(tensor.spec, ctypes.string_at(self._pinned, nbytes) if nbytes else b"")

    # --- consumer --------------------------------------------------------------------------------------------------
    def attach(self, announcement: bytes) -> None:
        """Open the peer's slab; raises PeerLost if it is not on our GPU."""
        told = msgspec.msgpack.decode(announcement, type=Announcement)
        if told.gpu_uuid != gpu_uuid(self._device):
            raise PeerLost("the peer's slab is on another GPU")
        handle = self._runtime.cudaIpcMemHandle_t()
        handle.reserved = told.handle
        _check(self._runtime.cudaSetDevice(self._device))
        flags = self._runtime.cudaIpcMemLazyEnablePeerAccess
        self._peer_pointer = int(_check(self._runtime.cudaIpcOpenMemHandle(handle, flags)))

    def read(self, offset: int, spec: TensorSpec) -> Tensor:
        """A view into the peer's slab, valid until the chunk is released."""
        return Tensor(spec, DeviceView(self._peer_pointer + offset, spec), f"cuda:{self._device}")

    def settle(self) -> None:
        if self._peer_pointer:
            _check(self._runtime.cudaStreamSynchronize(0))

    def close(self) -> None:
        """Let go of the peer's slab, then free ours."""
        if self._peer_pointer:
            _check(self._runtime.cudaIpcCloseMemHandle(self._peer_pointer))
            self._peer_pointer = 0
        if self._pointer:
            _check(self._runtime.cudaFree(self._pointer))
            self._pointer = 0
        self._free_pinned()

    def _free_pinned(self) -> None:
        if self._pinned:
            _check(self._runtime.cudaFreeHost(self._pinned))
            self._pinned = self._pinned_bytes = 0


def _pointer_of(tensor: Tensor) -> int:
    """Device address of a contiguous GPU tensor."""
    interface = tensor.data.__cuda_array_interface__
    if interface.get("strides") is not None:
        raise ValueError(f"tensor '{tensor.name}' is not contiguous")
    return interface["data"][0]


def _runtime() -> Any:
    """The CUDA runtime's Python binding."""
    from cuda.bindings import runtime

    return runtime


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a CUDA runtime call; raises RuntimeError naming the error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA: {error.name}")
    return values[0] if values else None
