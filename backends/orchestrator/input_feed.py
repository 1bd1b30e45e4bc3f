# SPDX-License-Identifier: Apache-2.0
"""Text that a client adds to its request while that runs, until the entry stage has taken it."""

from __future__ import annotations

from triton_omni.backends.control.hub import Peer
from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.errors import BadRequest, TooBusy
from triton_omni.backends.core.outputs import TextPiece
from triton_omni.backends.core.pipeline import CLIENT_EDGE

MAX_WAITING_CHARS = 1 << 16
"""Text that no stage has taken yet: more is refused until there is room."""
RETRY_AFTER_S = 1.0


class InputFeed:
    """The streamed input of one request, for its stage `stage`. `ended`: the client has said that nothing follows."""

    def __init__(self, run: bytes, stage: str, max_bytes: int) -> None:
        """`max_bytes` of all the text in UTF-8."""
        self.stage = stage
        self.ended = False
        self.active_s = 0.0
        """When the client last added something."""
        self._run = run
        self._bytes_left = max_bytes
        self._waiting = ""
        self._sent = 0
        self._is_complete = False

    def add(self, text: str, ends: bool, now_s: float) -> None:
        """Take more text; raises BadRequest or TooBusy, and then nothing of it is kept."""
        if self.ended:
            raise BadRequest("the request's input has ended", "ends_input")
        size = len(text.encode())
        if size > self._bytes_left:
            raise BadRequest(f"the streamed input must be at most {self._bytes_left} bytes more (got {size})", "input")
        if self._waiting and len(self._waiting) + len(text) > MAX_WAITING_CHARS:
            most = f"{len(self._waiting)} characters of the input wait for stage {self.stage}"
            raise TooBusy(f"{most}; send the text again later", "input", RETRY_AFTER_S)
        self._bytes_left -= size
        self._waiting += text
        self.ended = ends
        self.active_s = now_s

    def pump(self, worker: Peer | None, now_s: float) -> bool:
        """Send what waits to the stage's worker, in one chunk; True if nothing is left to send for now."""
        if self._is_complete or not (self._waiting or self.ended):
            return True
        piece = TextPiece(self._waiting) if self._waiting else None
        chunk = Chunk(self._run, CLIENT_EDGE, self._sent, self.ended, piece=piece, sent_s=now_s)
        if worker is None or not worker.put(chunk):
            return False
        self._sent += 1
        self._waiting = ""
        self._is_complete = self.ended
        return True
