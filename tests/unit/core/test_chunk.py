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
    assert Chunk(b"r", "e").meta is not Chunk(b"r", "e").meta
