# SPDX-License-Identifier: Apache-2.0
"""What crosses the edges of Qwen3-Omni, and how the consuming stage reads it. A full input is one last chunk.

    thinker → talker     first chunk: prompt_ids int32 (tokens,), and if there are media: media float32 (media
                         positions, hidden), meta with their shapes (thinker.media_shapes);
                         every chunk: token_ids int32 (tokens,), the text tokens to be spoken
    talker → code2wav    codes int16 (frames, books), read as they are

Text travels as token ids: the talker holds the thinker's token embeddings (0.6 GB of the real model), which equal the
thinker's layer-0 rows at text positions, also at positions that a prefix cache has skipped. Only media positions need
hidden rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.errors import StageFailed

EDGE = "thinker->talker"
SHAPES = ("image_grids", "video_grids", "video_steps_s", "audio_lengths")
"""Keys of a chunk's meta that come with `media`."""


@dataclass(frozen=True, slots=True)
class TalkerInput:
    """One chunk of the edge thinker → talker.

    prompt_ids  empty in all but the first chunk
    media       (media positions, hidden) float32: the accept layer's rows
    shapes      see thinker.media_shapes; empty without media
    """

    prompt_ids: list[int]
    token_ids: list[int]
    media: np.ndarray | None = None
    shapes: dict[str, Any] = field(default_factory=dict[str, Any])


def talker_input(chunk: Chunk) -> TalkerInput:
    """Adapter thinker → talker; only an empty last chunk brings nothing. Raises StageFailed for a missing key."""
    prompt_ids, token_ids, media = (_array(chunk, name) for name in ("prompt_ids", "token_ids", "media"))
    if prompt_ids is None and token_ids is None and not chunk.last:
        raise StageFailed("the chunk has neither 'prompt_ids' nor 'token_ids'", EDGE)
    if media is not None:
        missing = [key for key in SHAPES if key not in chunk.meta]
        if missing:
            raise StageFailed(f"the chunk has 'media' but no '{missing[0]}'", EDGE)
        media = media.copy()
    return TalkerInput(_ids(prompt_ids), _ids(token_ids), media, dict(chunk.meta))


def _ids(array: np.ndarray | None) -> list[int]:
    return [] if array is None else array.tolist()


def _array(chunk: Chunk, name: str) -> np.ndarray | None:
    tensor = chunk.tensor(name)
    if tensor is None:
        return None
    return np.frombuffer(tensor.data, tensor.spec.dtype).reshape(tensor.spec.shape)
