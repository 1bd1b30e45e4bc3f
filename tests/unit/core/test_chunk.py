# SPDX-License-Identifier: Apache-2.0
"""Chunks and tensors know their sizes."""

from __future__ import annotations

import numpy as np
import pytest

from triton_omni.backends.core.chunk import ITEM_BYTES, Chunk, Tensor, TensorSpec


@pytest.mark.parametrize("dtype", [d for d in ITEM_BYTES if d != "bfloat16"])
def test_sizes_are_numpys(dtype):
    for shape in ((), (0,), (3,), (2, 0, 5), (2, 3, 4)):
        array = np.zeros(shape, dtype)
        assert Tensor.of("x", array).spec.nbytes == array.nbytes


def test_a_chunk_adds_up_and_finds_its_tensors():
    x, y = Tensor.of("x", np.zeros((2, 3), np.float32)), Tensor.of("y", np.zeros(5, np.int64))
    chunk = Chunk(b"r", "e", tensors=(x, y))
    assert chunk.nbytes == 24 + 40
    assert chunk.tensor("y") is y
    assert chunk.tensor("z") is None
    assert Chunk(b"r", "e").nbytes == 0
    assert TensorSpec("b", "bfloat16", (3,)).nbytes == 6
    assert x.name == "x"


def test_chunks_are_things_not_values():
    assert Chunk(b"r", "e") != Chunk(b"r", "e")


@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_torch_reads_a_host_tensor_in_place(dtype):
    torch = pytest.importorskip("torch")
    data = bytes(range(8 * ITEM_BYTES[dtype])) if dtype != "bool" else bytes([0, 1] * 4)
    tensor = Tensor(TensorSpec("x", dtype, (2, 4)), memoryview(data))
    read = tensor.torch()
    assert (tuple(read.shape), str(read.dtype)) == ((2, 4), f"torch.{dtype}")
    assert read.reshape(-1).view(torch.uint8).numpy().tobytes() == data


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_tensor_made_of_torch_reads_back_equal(dtype, shape):
    torch = pytest.importorskip("torch")
    source = torch.arange(6).reshape(2, 3) if shape == (2, 3) else torch.ones(shape)
    source = source.to(getattr(torch, dtype))
    tensor = Tensor.of_torch("x", source)
    assert (tensor.spec.dtype, tensor.spec.shape, tensor.device) == (dtype, shape, "cpu")
    assert torch.equal(tensor.torch(), source)


def test_a_transposed_torch_tensor_is_copied():
    torch = pytest.importorskip("torch")
    source = torch.arange(6).reshape(2, 3).T
    tensor = Tensor.of_torch("x", source)
    assert bytes(tensor.data) == source.contiguous().numpy().tobytes()
    assert torch.equal(tensor.torch(), source)


def test_torch_does_not_warn_of_read_only_memory(recwarn):
    pytest.importorskip("torch")
    tensor = Tensor(TensorSpec("x", "uint8", (3,)), b"abc")
    assert tensor.torch().tolist() == [97, 98, 99]
    assert not recwarn.list
