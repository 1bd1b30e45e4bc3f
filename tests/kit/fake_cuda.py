# SPDX-License-Identifier: Apache-2.0
"""What cuda_ipc uses of cuda.bindings.runtime, over host memory, for machines without a GPU.

* Allocations are host memory that another process can open by its IPC handle, as CUDA's can.
* Work queued on a stream runs when that stream is synchronised and not before: a missing or a wrong synchronisation
  shows as stale bytes. As on a GPU, streams do not wait for each other.
* A process cannot open its own handles, unless `same_process` is set.
* `fail` makes a call return an error; `violations` lists what CUDA calls undefined behaviour.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import struct
from collections import defaultdict, deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from triton_omni.backends.core.chunk import Tensor

_HEADER_BYTES = mmap.PAGESIZE  # of a shared allocation: the processes that have it mapped
_MAX_OPENERS = 64
_HANDLE = struct.Struct("<QQQ")  # pid, descriptor, size
_PID = struct.Struct("<Q")


class CudaError(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorNoDevice = 100
    cudaErrorDeviceUninitialized = 201
    cudaErrorMapBufferObjectFailed = 205


class MemcpyKind(IntEnum):
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class IpcMemHandle:
    """64 bytes behind an address, as cuda-bindings has it."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


class _SharedMemory:
    """Mapped memory behind a header of opener pids. `fd`: the allocation is ours; -1: another process's."""

    def __init__(self, fd: int, nbytes: int, owned: bool) -> None:
        self.fd = fd if owned else -1
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, _HEADER_BYTES + nbytes)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.pointer = ctypes.addressof(self._anchor) + _HEADER_BYTES

    def openers(self) -> list[int]:
        return [pid for (pid,) in _PID.iter_unpack(self._map[: _MAX_OPENERS * _PID.size]) if pid and _is_alive(pid)]

    def note_opener(self, before: int, after: int) -> None:
        """Replace one entry of the list of openers; 0 is a free entry."""
        pids = [pid for (pid,) in _PID.iter_unpack(self._map[: _MAX_OPENERS * _PID.size])]
        _PID.pack_into(self._map, pids.index(before) * _PID.size, after)

    def close(self) -> None:
        del self._anchor
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)


class DeviceArray:
    """Device memory of an engine, with an engine's kernels."""

    def __init__(self, cuda: FakeCuda, data: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(data, max(1, len(data)))
        self.nbytes = len(data)
        self.pointer = ctypes.addressof(self._buffer)
        self._cuda = cuda
        cuda.ranges[self.pointer] = max(1, self.nbytes)

    def __del__(self) -> None:
        self._cuda.ranges.pop(self.pointer, None)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.pointer, False), "strides": None, "version": 3}

    def tobytes(self) -> bytes:
        return ctypes.string_at(self.pointer, self.nbytes)


class FakeCuda:
    """One process's CUDA runtime; has the names of cuda.bindings.runtime that cuda_ipc uses."""

    cudaMemcpyKind = MemcpyKind
    cudaIpcMemHandle_t = IpcMemHandle
    cudaIpcMemLazyEnablePeerAccess = 1
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrIpcEventSupport=125)

    def __init__(self, gpu: bytes = b"GPU-0", same_process: bool = False) -> None:
        self.gpu = gpu
        self.fail: dict[str, CudaError] = {}
        self.calls: list[str] = []
        self.violations: list[str] = []
        self.ranges: dict[int, int] = {}
        """Device memory that kernels and copies may touch: address → bytes."""
        self._same_process = same_process
        self._allocations: dict[int, _SharedMemory] = {}
        self._opened: dict[int, _SharedMemory] = {}
        self._pinned: dict[int, Any] = {}
        self._queues: dict[int, deque[Callable[[], object]]] = defaultdict(deque)

    # --- for tests ---------------------------------------------------------------------------------------------------
    def torch_module(self, stream: int) -> ModuleType:
        """Stands for torch in sys.modules: `stream` is current."""
        module = ModuleType("torch")
        module.cuda = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
            is_initialized=lambda: True, current_stream=lambda device: SimpleNamespace(cuda_stream=stream)
        )
        return module

    def tensor(self, name: str, array: np.ndarray) -> Tensor:
        """A GPU tensor with the array's bytes."""
        return Tensor(Tensor.of(name, array).spec, DeviceArray(self, array.tobytes()), "cuda:0")

    def launch(self, stream: int, kernel: Callable[[], object]) -> None:
        """Queue an engine's work on a stream."""
        self._queues[stream].append(kernel)

    def read(self, tensor: Tensor) -> bytes:
        """The bytes of a tensor now, wherever it is."""
        if tensor.device == "cpu" or not tensor.spec.nbytes:
            return bytes(tensor.data) if tensor.spec.nbytes else b""
        pointer = tensor.data.__cuda_array_interface__["data"][0]
        assert self._is_device(pointer, tensor.spec.nbytes), "not in device memory"
        return ctypes.string_at(pointer, tensor.spec.nbytes)

    @property
    def mapped(self) -> int:
        """Allocations of other processes that are mapped here."""
        return len(self._opened)

    @property
    def allocated(self) -> int:
        """Allocations of this process that were not freed."""
        return len(self._allocations)

    def end_process(self) -> None:
        """What the driver does when the process ends."""
        for memory in (*self._opened.values(), *self._allocations.values()):
            memory.close()
        self._opened.clear()
        self._allocations.clear()

    # --- cuda.bindings.runtime ---------------------------------------------------------------------------------------
    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return self._result("cudaGetDeviceCount", 1)

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return self._result("cudaDeviceGetAttribute", int(attribute == 125))

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, ...]:
        return self._result("cudaGetDeviceProperties", SimpleNamespace(uuid=SimpleNamespace(bytes=self.gpu)))

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        return self._result("cudaSetDevice")

    def cudaMalloc(self, nbytes: int) -> tuple[Any, ...]:
        if "cudaMalloc" in self.fail:
            return self._result("cudaMalloc")
        fd = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
        os.ftruncate(fd, _HEADER_BYTES + nbytes)
        memory = _SharedMemory(fd, nbytes, owned=True)
        self._allocations[memory.pointer] = memory
        return self._result("cudaMalloc", memory.pointer)

    def cudaFree(self, pointer: int) -> tuple[Any, ...]:
        memory = self._allocations.pop(pointer)
        if memory.openers():
            self.violations.append("memory was freed that another process has mapped")
        memory.close()
        return self._result("cudaFree")

    def cudaMallocHost(self, nbytes: int) -> tuple[Any, ...]:
        buffer = ctypes.create_string_buffer(nbytes)
        self._pinned[ctypes.addressof(buffer)] = buffer
        return self._result("cudaMallocHost", ctypes.addressof(buffer))

    def cudaFreeHost(self, pointer: int) -> tuple[Any, ...]:
        del self._pinned[pointer]
        return self._result("cudaFreeHost")

    def cudaMemcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> tuple[Any, ...]:
        to_device = kind == MemcpyKind.cudaMemcpyDeviceToDevice
        in_place = self._is_device(target, nbytes) if to_device else self._is_pinned(target, nbytes)
        if not self._is_device(source, nbytes) or not in_place:
            return (CudaError.cudaErrorInvalidValue,)
        self._queues[stream].append(partial(ctypes.memmove, target, source, nbytes))
        return self._result("cudaMemcpyAsync")

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        queue = self._queues[stream]
        while queue:
            queue.popleft()()
        return self._result("cudaStreamSynchronize")

    def cudaDeviceSynchronize(self) -> tuple[Any, ...]:
        for stream in list(self._queues):
            self.cudaStreamSynchronize(stream)
        return self._result("cudaDeviceSynchronize")

    def cudaIpcGetMemHandle(self, pointer: int) -> tuple[Any, ...]:
        memory, handle = self._allocations[pointer], IpcMemHandle()
        ctypes.memmove(handle.getPtr(), _HANDLE.pack(os.getpid(), memory.fd, memory.nbytes), _HANDLE.size)
        return self._result("cudaIpcGetMemHandle", handle)

    def cudaIpcOpenMemHandle(self, handle: IpcMemHandle, flags: int) -> tuple[Any, ...]:
        if "cudaIpcOpenMemHandle" in self.fail:
            return self._result("cudaIpcOpenMemHandle")
        pid, fd, nbytes = _HANDLE.unpack(ctypes.string_at(handle.getPtr(), _HANDLE.size))
        if pid == os.getpid() and not self._same_process:
            return (CudaError.cudaErrorDeviceUninitialized,)
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return (CudaError.cudaErrorMapBufferObjectFailed,)
        memory = _SharedMemory(opened, nbytes, owned=False)
        os.close(opened)
        memory.note_opener(0, os.getpid())
        self._opened[memory.pointer] = memory
        return self._result("cudaIpcOpenMemHandle", memory.pointer)

    def cudaIpcCloseMemHandle(self, pointer: int) -> tuple[Any, ...]:
        if pointer not in self._opened:
            return (CudaError.cudaErrorInvalidValue,)
        if any(self._queues.values()):
            self.violations.append("memory was unmapped that queued work may use")
        memory = self._opened.pop(pointer)
        memory.note_opener(os.getpid(), 0)
        memory.close()
        return self._result("cudaIpcCloseMemHandle")

    def _result(self, call: str, *values: Any) -> tuple[Any, ...]:
        self.calls.append(call)
        error = self.fail.get(call, CudaError.cudaSuccess)
        return (error, *values) if error is CudaError.cudaSuccess else (error, *(None for _ in values))

    def _is_device(self, pointer: int, nbytes: int) -> bool:
        shared = itertools.chain(self._allocations.values(), self._opened.values())
        ranges = [*self.ranges.items(), *((memory.pointer, memory.nbytes) for memory in shared)]
        return any(start <= pointer <= pointer + nbytes <= start + length for start, length in ranges)

    def _is_pinned(self, pointer: int, nbytes: int) -> bool:
        return any(start <= pointer <= pointer + nbytes <= start + len(buf) for start, buf in self._pinned.items())


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False
