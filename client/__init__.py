# SPDX-License-Identifier: Apache-2.0
"""Python clients of a Triton-Omni server. No torch: `pip install triton-omni[client]` is enough.

    from triton_omni import Client, GenerateRequest, Message

    with Client("127.0.0.1:8001") as client:
        for piece in client.generate("chat", GenerateRequest(messages=(Message("user", "Hello!"),))):
            print(piece.text or "", end="")

Names are imported at their first use: engine workers and stubs import `triton_omni.backends` without the client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton_omni.backends.wire import Deadlines, Event, GenerateRequest, Message, OmniError, Part, Sampling
    from triton_omni.connection import AsyncClient
    from triton_omni.fetch import read_url
    from triton_omni.media import Media, MediaError
    from triton_omni.omni import Omni
    from triton_omni.pieces import Piece
    from triton_omni.sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "Deadlines",
    "Event",
    "GenerateRequest",
    "Media",
    "MediaError",
    "Message",
    "Omni",
    "OmniError",
    "Part",
    "Piece",
    "Sampling",
    "read_url",
]

_MODULES = {
    "AsyncClient": "connection",
    "Client": "sync",
    "Media": "media",
    "MediaError": "media",
    "Omni": "omni",
    "Piece": "pieces",
    "read_url": "fetch",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'triton_omni' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"triton_omni.{_MODULES.get(name, 'backends.wire')}"), name)
    globals()[name] = value
    return value
