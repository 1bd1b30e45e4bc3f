# SPDX-License-Identifier: Apache-2.0
"""What crosses the edges of pipeline `chat`.

    transcriber → thinker   TranscriptPiece of a whole audio part, one chunk per part
    thinker → talker        TextPiece with the new text
    talker → code2wav       codes int16 (frames, 9), one chunk per clause, or more for a long one; with a WordsPiece
                            of the words in them

Every edge may end with an empty last chunk. What an adapter misses fails the run, naming edge and key.
"""

from __future__ import annotations

from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.outputs import TextPiece, TranscriptPiece


def transcript_of(chunk: Chunk) -> TranscriptPiece | None:
    """Adapter transcriber → thinker: None for an empty last chunk."""
    return chunk.piece_of(TranscriptPiece)


def text_of(chunk: Chunk) -> str:
    """Adapter thinker → talker: "" for an empty last chunk."""
    piece = chunk.piece_of(TextPiece)
    return piece.text if piece is not None else ""
