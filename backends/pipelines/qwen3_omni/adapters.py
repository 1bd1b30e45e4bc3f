# SPDX-License-Identifier: Apache-2.0
"""What crosses the edges of Qwen3-Omni, and how the consuming stage reads it. A full input is one last chunk.

    thinker → talker     first chunk: prompt_ids int32 (tokens,), and if there are media: media (media
                         positions, hidden) in the thinker's dtype, on its GPU where both stages share it, and their
                         shapes (MEDIA_SHAPES);
                         every chunk: token_ids int32 (tokens,), the text tokens to be spoken
    talker → code2wav    codes int16 (frames, books), read as they are

Text travels as token ids: the talker holds the thinker's token embeddings (0.6 GB of the real model), which equal the
thinker's layer-0 rows at text positions, also at positions that a prefix cache has skipped. Only media positions need
hidden rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.errors import StageFailed

if TYPE_CHECKING:
    from torch import Tensor as TorchTensor

EDGE = "thinker->talker"
MEDIA_SHAPES = {
    "image_grids": np.int64,
    "video_grids": np.int64,
    "video_steps_s": np.float64,
    "audio_lengths": np.int64,
}
"""Tensors that come with `media`: name → dtype."""


@dataclass(frozen=True, slots=True)
class TalkerInput:
    """One chunk of the edge thinker → talker.

    prompt_ids  empty in all but the first chunk
    media       (media positions, hidden): the accept layer's rows, on the device where they arrived
    shapes      see thinker.media_shapes; all empty without media
    """

    prompt_ids: list[int]
    token_ids: list[int]
    media: TorchTensor | None = None
    shapes: Mapping[str, Sequence[object]] = field(default_factory=dict[str, Sequence[object]])


def talker_input(chunk: Chunk) -> TalkerInput:
    """Adapter thinker → talker; only an empty last chunk brings nothing. Raises StageFailed for a missing key."""
    prompt_ids, token_ids = _array(chunk, "prompt_ids"), _array(chunk, "token_ids")
    if prompt_ids is None and token_ids is None and not chunk.last:
        raise StageFailed("the chunk has neither 'prompt_ids' nor 'token_ids'", EDGE)
    media = None
    if (tensor := chunk.tensor("media")) is not None:
        missing = [name for name in MEDIA_SHAPES if chunk.tensor(name) is None]
        if missing:
            raise StageFailed(f"the chunk has 'media' but no '{missing[0]}'", EDGE)
        media = tensor.torch().clone()  # the carrier reuses its memory once the chunk is released
    shapes = {name: _ids(_array(chunk, name)) for name in MEDIA_SHAPES}
    return TalkerInput(_ids(prompt_ids), _ids(token_ids), media, shapes)


def _ids(array: np.ndarray | None) -> list[Any]:
    return [] if array is None else array.tolist()


def _array(chunk: Chunk, name: str) -> np.ndarray | None:
    tensor = chunk.tensor(name)
    if tensor is None:
        return None
    return np.frombuffer(tensor.data, tensor.spec.dtype).reshape(tensor.spec.shape)
