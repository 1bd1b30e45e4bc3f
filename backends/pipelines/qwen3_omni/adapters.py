# SPDX-License-Identifier: Apache-2.0
"""What crosses the edges of Qwen3-Omni, and how the consuming stage reads it. A full input is one last chunk.

    thinker → talker     first chunk: prompt_ids int32 (tokens,), and if there are media: media float32 (media
                         positions, hidden), meta with their shapes (thinker.media_shapes);
                         every chunk: token_ids int32 (words,), the tokens to be spoken
    talker → code2wav    codes int16 (frames, books), read as they are

Words travel as token ids: the talker holds the thinker's word embeddings (0.6 GB of the real model), which are what
the thinker's layer-0 rows are at text positions, also for positions that a prefix cache has skipped. Only media
positions need hidden rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triton_omni.backends.core.chunk import Chunk


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of the edge thinker → talker. `prompt_ids` is empty in all but the first."""

    prompt_ids: list[int]
    token_ids: list[int]
    media: np.ndarray | None = None
    """(media positions, hidden) float32: the accept layer's rows"""
    shapes: dict[str, Any] = field(default_factory=dict[str, Any])


def piece_of(chunk: Chunk) -> Piece:
    """Adapter thinker → talker; an empty last chunk is a piece without words."""
    media = _array(chunk, "media")
    rows = None if media is None else media.copy()
    return Piece(_ids(chunk, "prompt_ids"), _ids(chunk, "token_ids"), rows, dict(chunk.meta))


def _ids(chunk: Chunk, name: str) -> list[int]:
    array = _array(chunk, name)
    return [] if array is None else array.tolist()


def _array(chunk: Chunk, name: str) -> np.ndarray | None:
    tensor = chunk.tensor(name)
    if tensor is None:
        return None
    return np.frombuffer(tensor.data, tensor.spec.dtype).reshape(tensor.spec.shape)
