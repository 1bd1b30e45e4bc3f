# SPDX-License-Identifier: Apache-2.0
"""The extent allocator against a plain model, and the credits."""

from __future__ import annotations

import random

import pytest

from triton_omni.backends.connectors.base import Credits
from triton_omni.backends.connectors.slab import ALIGN_BYTES, Extents


def test_extents_never_overlap_and_all_room_comes_back():
    rng = random.Random(3)
    extents, held = Extents(1 << 20), {}
    for _ in range(20_000):
        if held and rng.random() < 0.5:
            offset = rng.choice(list(held))
            extents.free(offset)
            del held[offset]
        else:
            nbytes = rng.choice((0, 1, 4095, 4096, 4097, 70_000, 300_000))
            offset = extents.alloc(nbytes)
            if offset is None:
                continue
            assert offset % ALIGN_BYTES == 0
            assert offset + nbytes <= extents.size
            for other, length in held.items():
                assert offset + max(nbytes, 1) <= other or other + max(length, 1) <= offset
            held[offset] = nbytes
    for offset in held:
        extents.free(offset)
    assert extents.alloc(1 << 20) == 0, "freed extents joined up to the whole"


def test_a_free_of_what_is_not_used_is_an_error():
    extents = Extents(1 << 20)
    with pytest.raises(KeyError):
        extents.free(0)
    offset = extents.alloc(10)
    extents.free(offset)
    with pytest.raises(KeyError):
        extents.free(offset)


def test_credits_are_kept_per_run_and_edge_and_in_all():
    credits = Credits(window=1, limit=2)
    credits.take((b"a", "e"))
    assert not credits.free((b"a", "e"))
    assert credits.free((b"a", "f"))
    credits.take((b"b", "e"))
    assert not credits.free((b"c", "e")), "the link is full"
    credits.give((b"a", "e"))
    assert credits.free((b"a", "e"))
    credits.give((b"b", "e"))
    assert credits.total == 0
    assert not credits.used
