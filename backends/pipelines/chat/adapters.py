# SPDX-License-Identifier: Apache-2.0
"""What crosses the edges of pipeline `chat`.

    transcriber → thinker   meta {"index": number of the audio part, "text": its transcript}, one chunk per part
    thinker → talker        meta {"text": delta}
    talker → code2wav       codes int16 (frames, 9), one chunk per clause

Every edge may end with an empty last chunk.
"""

from __future__ import annotations

from typing import Any

from triton_omni.backends.core.chunk import Chunk


def transcript_of(chunk: Chunk) -> dict[str, Any]:
    """Adapter transcriber → thinker: {} for an empty last chunk."""
    return dict(chunk.meta)


def text_of(chunk: Chunk) -> str:
    """Adapter thinker → talker: "" for an empty last chunk."""
    text = chunk.meta.get("text", "")
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, not {type(text).__name__}")
    return text
