# SPDX-License-Identifier: Apache-2.0
"""Python clients of a Triton-Omni server. No torch: `pip install triton-omni[client]` is enough.

from client import Client, GenerateRequest, Message

with Client("127.0.0.1:8001") as client:
    for piece in client.generate("chat", GenerateRequest(messages=(Message("user", "Hello!"),))):
        print(piece.text or "", end="")
"""

from __future__ import annotations

from backends.wire import Deadlines, Event, GenerateRequest, Message, OmniError, Part, Sampling
from client.connection import AsyncClient
from client.fetch import read_url
from client.media import Media, MediaError
from client.pieces import Piece
from client.sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "Deadlines",
    "Event",
    "GenerateRequest",
    "Media",
    "MediaError",
    "Message",
    "OmniError",
    "Part",
    "Piece",
    "Sampling",
    "read_url",
]
