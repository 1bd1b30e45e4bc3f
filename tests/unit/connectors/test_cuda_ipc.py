# SPDX-License-Identifier: Apache-2.0
"""The device slab without a GPU: real handles of cuda-bindings, the engine's stream, bounds, and what torch reads."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from tests.kit.fake_cuda import CudaError, FakeCuda
from tests.kit.gpu_devices import SameProcessMapping
from triton_omni.backends.connectors import cuda_ipc
from triton_omni.backends.connectors.cuda_ipc import Announcement, DeviceSlab, DeviceView
from triton_omni.backends.connectors.device import DevicePath
from triton_omni.backends.control.hub import Hub
from triton_omni.backends.core.chunk import Chunk, TensorSpec


@pytest.fixture
def cuda():
    runtime = FakeCuda(same_process=True)
    yield runtime
    assert runtime.violations == []
    runtime.end_process()


def attached(cuda, nbytes=8192):
    """A slab and another end's that has it mapped."""
    ours, theirs = DeviceSlab(nbytes=nbytes, runtime=cuda), DeviceSlab(nbytes=nbytes, runtime=cuda)
    theirs.attach(ours.announce())
    return ours, theirs


# --- handles -----------------------------------------------------------------------------------------------------
def test_a_real_ipc_handle_crosses_as_its_64_bytes():
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed (make setup)")
    data = bytes(range(64))
    assert cuda_ipc.handle_bytes(cuda_ipc.handle_of(runtime, data)) == data
    assert cuda_ipc.handle_bytes(runtime.cudaIpcMemHandle_t()) == bytes(64)


@pytest.mark.parametrize("length", [0, 63, 65])
def test_an_ipc_handle_of_another_length_is_refused(cuda, length):
    with pytest.raises(ValueError, match="64 bytes"):
        cuda_ipc.handle_of(cuda, bytes(length))


def test_every_name_that_the_slab_uses_exists_in_cuda_bindings():
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed (make setup)")
    names = {name for name in dir(FakeCuda) if name.startswith("cuda")}
    assert [name for name in sorted(names) if not hasattr(runtime, name)] == []
    assert hasattr(runtime.cudaMemcpyKind, "cudaMemcpyDeviceToHost")
    assert hasattr(runtime.cudaDeviceAttr, "cudaDevAttrIpcEventSupport")


# --- streams -----------------------------------------------------------------------------------------------------
def test_copies_wait_in_the_stream_that_torch_calls_current(cuda, monkeypatch):
    ours, theirs = attached(cuda)
    monkeypatch.setitem(sys.modules, "torch", cuda.torch_module(stream=7))
    tensor = cuda.tensor("x", np.arange(8, dtype=np.uint8))
    ran = []
    cuda.launch(0, lambda: ran.append("default stream"))
    cuda.launch(7, lambda: ran.append("engine's stream"))
    ours.write([(0, tensor)])
    assert ran == ["engine's stream"]
    assert cuda.read(theirs.read(0, tensor.spec)) == bytes(range(8))


def test_without_torch_on_a_gpu_the_default_stream_is_used(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert cuda_ipc.current_stream(0) == 0
    unused = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", unused)
    assert cuda_ipc.current_stream(0) == 0


def test_several_tensors_are_copied_to_the_host_with_one_wait(cuda):
    slab = DeviceSlab(nbytes=8192, runtime=cuda)
    arrays = [np.arange(n, dtype=np.int32) for n in (3, 0, 1000)]
    copies = slab.to_host([cuda.tensor(f"t{i}", array) for i, array in enumerate(arrays)])
    assert [bytes(t.data) for t in copies] == [a.tobytes() for a in arrays]
    assert {t.device for t in copies} == {"cpu"}
    assert cuda.calls.count("cudaStreamSynchronize") == 1
    slab.close(peer_closed=True)


# --- bounds ------------------------------------------------------------------------------------------------------
def test_a_slab_that_is_not_attached_cannot_be_read(cuda):
    with pytest.raises(ValueError, match="not attached"):
        DeviceSlab(runtime=cuda).read(0, TensorSpec("x", "uint8", (1,)))


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (8192, 1), (8000, 193), (0, 8193)])
def test_a_tensor_outside_the_slab_cannot_be_read(cuda, offset, nbytes):
    _, theirs = attached(cuda)
    assert theirs.read(8191, TensorSpec("x", "uint8", (1,))).device == "cuda:0"
    with pytest.raises(ValueError, match="outside"):
        theirs.read(offset, TensorSpec("x", "uint8", (nbytes,)))


def test_a_second_announcement_of_one_peer_is_malformed(cuda):
    ours, theirs = attached(cuda)
    with pytest.raises(ValueError, match="second"):
        theirs.attach(ours.announce())


def test_a_failed_announcement_can_be_tried_again(cuda):
    slab = DeviceSlab(runtime=cuda)
    cuda.fail["cudaIpcGetMemHandle"] = CudaError.cudaErrorInvalidValue
    with pytest.raises(RuntimeError, match="cudaErrorInvalidValue"):
        slab.announce()
    del cuda.fail["cudaIpcGetMemHandle"]
    assert len(msgspec.msgpack.decode(slab.announce(), type=Announcement).handle) == 64
    slab.close(peer_closed=True)


# --- torch -------------------------------------------------------------------------------------------------------
def test_torch_takes_a_received_tensor_up_to_the_missing_gpu(cuda):
    """A read-only flag would be a TypeError, here and on every GPU."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("the CUDA build reads memory that is not on its GPU")
    _, theirs = attached(cuda)
    tensor = theirs.read(0, TensorSpec("x", "bfloat16", (2, 2)))
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        tensor.torch()


def test_a_view_keeps_the_mapping_until_it_is_dropped(cuda):
    ours, theirs = attached(cuda)
    view = theirs.read(0, TensorSpec("x", "uint8", (1,)))
    theirs.close(peer_closed=True)
    assert cuda.mapped == 1
    del view
    assert cuda.mapped == 0
    ours.close(peer_closed=True)


def test_queued_work_ends_before_a_slab_is_unmapped(cuda):
    ours, theirs = attached(cuda)
    cuda.launch(5, lambda: None)
    theirs.close(peer_closed=True)
    assert cuda.violations == [], "the fake records an unmapping under queued work"
    ours.close(peer_closed=True)


def test_failures_at_the_end_of_a_link_are_logged_and_not_raised(cuda, caplog):
    ours, theirs = attached(cuda)
    cuda.fail["cudaFree"] = cuda.fail["cudaDeviceSynchronize"] = CudaError.cudaErrorInvalidValue
    theirs.close(peer_closed=True)
    ours.close(peer_closed=True)
    assert caplog.text.count("cudaErrorInvalidValue") == 2


def test_the_interface_describes_writable_bytes():
    view = DeviceView(SameProcessMapping(SimpleNamespace(), 4096, 100), 64, 8)
    assert view.__cuda_array_interface__["data"] == (4160, False)
    assert view.__cuda_array_interface__["typestr"] == "|u1"


# --- which way ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ours", "theirs", "state", "reason"),
    [
        ("a", "a", "allowed", "nothing was announced"),
        ("a", "b", "host", "another GPU"),
        ("a", "", "host", "peer has no GPU"),
        ("", "a", "host", "cannot be shared"),
        ("", "", "host", "cannot be shared"),
    ],
)
def test_the_hello_of_both_ends_decides_whether_a_slab_is_offered(cuda, ours, theirs, state, reason):
    path = DevicePath(DeviceSlab(runtime=cuda))
    path.meet("talker", ours, theirs)
    assert path.state == state
    assert reason in path.reason
    assert (path.announcement() is None) == (state == "host")
    assert path.peer_has_gpu == bool(theirs)
    assert path.summary.startswith("talker: host memory (" if state == "host" else "talker: GPU memory (")
    path.close(peer_closed=True)


def test_an_answer_without_an_announcement_is_malformed(cuda):
    path = DevicePath(DeviceSlab(runtime=cuda))
    path.meet("talker", "a", "a")
    with pytest.raises(ValueError, match="no announcement"):
        path.on_answer("")


def test_two_hubs_decide_the_path_of_their_link_and_name_it(tmp_path):
    runtimes = [FakeCuda(same_process=True) for _ in range(2)]
    thinker, talker, orchestrator = (
        Hub("thinker", tmp_path / "a", lambda: DeviceSlab(nbytes=1 << 20, runtime=runtimes[0]), "GPU-0"),
        Hub("talker", tmp_path / "b", lambda: DeviceSlab(nbytes=1 << 20, runtime=runtimes[1]), "GPU-0"),
        Hub("orchestrator", tmp_path / "c"),
    )
    link = thinker.connect(talker.address)
    thinker.connect(orchestrator.address)
    for hub in (talker, orchestrator, thinker, talker):
        hub.poll(1.0)
    assert thinker.gpu_paths() == "talker: GPU memory (nothing was announced yet)", "the orchestrator has no GPU"
    assert orchestrator.gpu_paths() == ""
    assert link.put(Chunk(b"r" * 16, "e", tensors=(runtimes[0].tensor("x", np.ones(3)),)))
    received = [item for _, item in talker.poll(1.0) if isinstance(item, Chunk)]
    thinker.poll(1.0)
    assert [chunk.tensors[0].device for chunk in received] == ["cpu"], "the peer had not answered"
    assert thinker.gpu_paths() == "talker: GPU memory"
    for hub in (thinker, talker, orchestrator):
        hub.close()
    received.clear()
    for runtime in runtimes:
        runtime.end_process()


# --- which GPU ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "uuid"),
    [
        ({}, "4750552d30"),
        ({"cudaGetDeviceCount": lambda: (CudaError.cudaSuccess, 0)}, ""),
        ({"cudaGetDeviceCount": lambda: (CudaError.cudaErrorNoDevice, None)}, ""),
        ({"cudaDeviceGetAttribute": lambda attribute, device: (CudaError.cudaSuccess, 0)}, ""),
        ({"cudaGetDeviceProperties": lambda device: (CudaError.cudaErrorInvalidValue, None)}, ""),
    ],
    ids=["a GPU", "no GPU", "no driver", "memory that cannot be shared", "a GPU that does not answer"],
)
def test_only_a_gpu_whose_memory_can_be_shared_has_a_uuid(monkeypatch, cuda, change, uuid):
    for name, function in change.items():
        monkeypatch.setattr(cuda, name, function)
    assert cuda_ipc.gpu_uuid(runtime=cuda) == uuid


def test_without_the_binding_there_is_neither_a_uuid_nor_a_slab(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert cuda_ipc.gpu_uuid() == ""
    assert cuda_ipc.device_slab() is None
