# SPDX-License-Identifier: Apache-2.0
"""Tensors between two processes on one GPU without a copy through the host.

One device slab per link and direction: one cudaMalloc by the producer, announced with its IPC handle, opened once by
the peer, then offsets per chunk. Between two stages on one GPU a tensor is copied once, device to device. device.py
decides per link whether a slab is used; elsewhere tensors go through pinned host memory.

Ordering: engines queue their work on the stream that torch calls current in the worker's thread. The copy into the
slab is queued on that stream and complete before the descriptor is sent; the consumer's reads are queued on its own
current stream and complete before the acknowledgement.

Lifetime: CUDA forbids freeing memory that another process has mapped. The consumer waits for its stream and unmaps
before it closes the socket; the producer frees after the peer's EOF. A slab whose peer has not closed is left to
the end of the process.

Needs cuda-bindings (the extra `cuda`). Not run on a GPU by this project's CI: tests/kit/fake_cuda.py stands in.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import sys
from collections.abc import Sequence
from enum import IntEnum
from types import ModuleType
from typing import Any, Protocol

import msgspec

from triton_omni.backends.connectors.slab import Extents
from triton_omni.backends.core.chunk import Tensor, TensorSpec

log = logging.getLogger("triton_omni.connectors")

DEVICE_SLAB_BYTES = 256 << 20  # a few hundred thinker rows of a 30B model, or one second of code2wav latents
PINNED_ALIGN = 64  # any vector load
HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE in cuda.h


class Announcement(msgspec.Struct, array_like=True, frozen=True):
    """How a peer opens our slab."""

    handle: bytes
    gpu_uuid: str
    nbytes: int


class DeviceView:
    """Bytes of another process's device memory, for `torch.as_tensor`. Keeps the mapping open while it lives."""

    def __init__(self, mapping: Mapping, offset: int, nbytes: int) -> None:
        self._mapping = mapping
        self._pointer = mapping.pointer + offset
        self._nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        # torch refuses the read-only flag; no stream, because the bytes were complete when the chunk was sent
        data = (self._pointer, False)
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}


class IpcHandle(Protocol):
    """A cudaIpcMemHandle_t."""

    def getPtr(self) -> int: ...


class Mapping:
    """The peer's slab in our address space; unmapped when neither the link nor a tensor uses it."""

    def __init__(self, runtime: ModuleType, pointer: int, nbytes: int) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self._runtime = runtime

    def __del__(self) -> None:
        for result in (self._runtime.cudaDeviceSynchronize(), self._runtime.cudaIpcCloseMemHandle(self.pointer)):
            _log_failure("a peer's slab was not unmapped", result)


def gpu_uuid(device: int = 0, runtime: ModuleType | None = None) -> str:
    """UUID of a visible GPU whose memory other processes can open; "" where there is none."""
    try:
        runtime = runtime or load_runtime()
        count = _check(runtime.cudaGetDeviceCount())
        can_share = runtime.cudaDeviceAttr.cudaDevAttrIpcEventSupport  # CUDA's manual names it as the test
        if device >= count or not _check(runtime.cudaDeviceGetAttribute(can_share, device)):
            return ""
        return _check(runtime.cudaGetDeviceProperties(device)).uuid.bytes.hex()
    except (ImportError, RuntimeError) as error:
        log.warning("GPU memory is not shared between workers: %s", error)
        return ""


def device_slab() -> DeviceSlab | None:
    """The device store of a new link; None without cuda-bindings."""
    try:
        return DeviceSlab()
    except ImportError:
        return None


class DeviceSlab:
    """One link's device memory, ours and the peer's; implements device.DeviceStore.

    `runtime` is the module cuda.bindings.runtime, or what behaves like it. Used by the worker's thread only.
    """

    def __init__(self, device: int = 0, nbytes: int = DEVICE_SLAB_BYTES, runtime: ModuleType | None = None) -> None:
        self._runtime = runtime or load_runtime()
        self._device = device
        self._extents = Extents(nbytes)
        self._pointer = 0
        self._peer: Mapping | None = None
        self._pinned = 0
        self._pinned_bytes = 0

    # --- producer --------------------------------------------------------------------------------------------------
    def announce(self) -> bytes:
        _check(self._runtime.cudaSetDevice(self._device))
        if not self._pointer:
            self._pointer = int(_check(self._runtime.cudaMalloc(self._extents.size)))
        handle = handle_bytes(_check(self._runtime.cudaIpcGetMemHandle(self._pointer)))
        uuid = gpu_uuid(self._device, self._runtime)
        return msgspec.msgpack.encode(Announcement(handle, uuid, self._extents.size))

    def alloc(self, nbytes: int) -> int | None:
        return self._extents.alloc(nbytes)

    def free(self, offset: int) -> None:
        self._extents.free(offset)

    def write(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._copy([(self._pointer + at, pointer_of(t), t.spec.nbytes) for at, t in parts if t.spec.nbytes], kind)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in one pinned buffer, which the next call overwrites."""
        offsets: list[int] = []
        end = 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.spec.nbytes // PINNED_ALIGN) * PINNED_ALIGN
        self._reserve_pinned(end)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        sizes = [tensor.spec.nbytes for tensor in tensors]
        placed = list(zip(offsets, tensors, sizes, strict=True))
        self._copy([(self._pinned + at, pointer_of(t), n) for at, t, n in placed if n], kind)
        return [Tensor(t.spec, _host_view(self._pinned + at, n) if n else b"") for at, t, n in placed]

    # --- consumer --------------------------------------------------------------------------------------------------
    def attach(self, announcement: bytes) -> None:
        offer = msgspec.msgpack.decode(announcement, type=Announcement)
        if self._peer is not None:
            raise ValueError("a second slab of one peer")
        if offer.gpu_uuid != gpu_uuid(self._device, self._runtime):
            raise RuntimeError("it is on another GPU")
        handle = handle_of(self._runtime, offer.handle)
        _check(self._runtime.cudaSetDevice(self._device))
        flags = self._runtime.cudaIpcMemLazyEnablePeerAccess
        pointer = int(_check(self._runtime.cudaIpcOpenMemHandle(handle, flags)))
        self._peer = Mapping(self._runtime, pointer, offer.nbytes)

    def read(self, offset: int, spec: TensorSpec) -> Tensor:
        if self._peer is None:
            raise ValueError(f"tensor '{spec.name}' is in a slab that was not attached")
        if not 0 <= offset <= offset + spec.nbytes <= self._peer.nbytes:
            raise ValueError(f"tensor '{spec.name}' at {offset} is outside a slab of {self._peer.nbytes} bytes")
        return Tensor(spec, DeviceView(self._peer, offset, spec.nbytes), f"cuda:{self._device}")

    def settle(self) -> None:
        _check(self._runtime.cudaStreamSynchronize(current_stream(self._device)))

    def close(self, peer_closed: bool) -> None:
        self._peer = None
        if self._pointer and peer_closed:
            _log_failure("a slab was not freed", self._runtime.cudaFree(self._pointer))
        elif self._pointer:
            log.info("a slab of GPU memory is left to the end of the process: the peer may have it mapped")
        self._pointer = 0
        self._free_pinned()

    def _copy(self, copies: Sequence[tuple[int, int, int]], kind: int) -> None:
        """Copy (target, source, bytes) in the engine's stream, after the kernels that it has queued; waits."""
        if copies:
            stream = current_stream(self._device)
            for target, source, nbytes in copies:
                _check(self._runtime.cudaMemcpyAsync(target, source, nbytes, kind, stream))
            _check(self._runtime.cudaStreamSynchronize(stream))

    def _reserve_pinned(self, nbytes: int) -> None:
        if nbytes > self._pinned_bytes:
            self._free_pinned()
            self._pinned = int(_check(self._runtime.cudaMallocHost(nbytes)))
            self._pinned_bytes = nbytes

    def _free_pinned(self) -> None:
        if self._pinned:
            _log_failure("pinned memory was not freed", self._runtime.cudaFreeHost(self._pinned))
            self._pinned = self._pinned_bytes = 0


def current_stream(device: int) -> int:
    """The stream that torch queues work on in this thread; the default stream where torch uses no GPU."""
    torch = sys.modules.get("torch")  # never imported here: a process without it has no such stream
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


def handle_bytes(handle: IpcHandle) -> bytes:
    """A cudaIpcMemHandle_t as bytes. The binding has no accessor but the address of the C struct."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def handle_of(runtime: ModuleType, data: bytes) -> IpcHandle:
    """The cudaIpcMemHandle_t with these bytes; raises ValueError for another length."""
    if len(data) != HANDLE_BYTES:
        raise ValueError(f"an IPC handle has {HANDLE_BYTES} bytes (got {len(data)})")
    handle = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), data, HANDLE_BYTES)
    return handle


def pointer_of(tensor: Tensor) -> int:
    """Device address of a GPU tensor; raises ValueError if its bytes are not contiguous."""
    interface = tensor.data.__cuda_array_interface__
    if interface.get("strides") is not None:
        raise ValueError(f"tensor '{tensor.name}' is not contiguous")
    return interface["data"][0]


def load_runtime() -> ModuleType:
    """The CUDA runtime's Python binding; raises ImportError without it."""
    return importlib.import_module("cuda.bindings.runtime")


def _host_view(pointer: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(pointer)).cast("B")


def _log_failure(what: str, result: tuple[IntEnum, ...]) -> None:
    """Log a failed call of the end of a link, where nothing can be done about it."""
    if int(result[0]):
        log.warning("%s: CUDA: %s", what, result[0].name)


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a CUDA runtime call; raises RuntimeError naming the error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA: {error.name}")
    return values[0] if values else None
