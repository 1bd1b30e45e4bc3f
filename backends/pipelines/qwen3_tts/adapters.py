# SPDX-License-Identifier: Apache-2.0
"""What crosses the edges of Qwen3-TTS. All are chunk edges; who needs all of an input waits for its last chunk.

voice → talker      one chunk: vector float32 (hidden,), and if the recording has a transcript: frames int16
                    (frames, books), its codes
talker → code2wav   context int16 (frames, books), once and first, if the audio goes on from a recording;
                    codes int16 (frames, books), read as they are
code2wav → aligner  audio float32 (samples,), the samples that the client gets
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.errors import StageFailed

VOICE_EDGE = "voice->talker"


@dataclass(frozen=True, slots=True)
class VoiceInput:
    """A voice out of a recording: its vector (hidden,), and with a transcript its codes (frames, books)."""

    vector: np.ndarray
    frames: np.ndarray | None


def voice_input(chunk: Chunk) -> VoiceInput | None:
    """Adapter voice → talker; None for an empty last chunk. Raises StageFailed for a missing or wrong tensor."""
    if chunk.is_empty:
        return None
    vector, frames = chunk.tensor("vector"), chunk.tensor("frames")
    if vector is None or vector.spec.dtype != "float32" or len(vector.spec.shape) != 1:
        raise StageFailed("the chunk has no 'vector' of float32 [hidden]", VOICE_EDGE)
    if frames is not None and (frames.spec.dtype != "int16" or len(frames.spec.shape) != 2):
        raise StageFailed("'frames' must be int16 [frames, books]", VOICE_EDGE)
    return VoiceInput(_array(vector), None if frames is None else _array(frames))


def _array(tensor: Tensor) -> np.ndarray:
    """A copy: the carrier reuses its memory once the chunk is released."""
    return np.frombuffer(tensor.data, tensor.spec.dtype).reshape(tensor.spec.shape).copy()


def samples_of(chunk: Chunk) -> np.ndarray:
    """Adapter code2wav → aligner: a copy of the chunk's samples, of which an empty one has none."""
    tensor = chunk.tensor("audio")
    return np.zeros(0, np.float32) if tensor is None else _array(tensor)
