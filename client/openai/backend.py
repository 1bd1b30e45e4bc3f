# SPDX-License-Identifier: Apache-2.0
"""What the proxy needs of a server; AsyncClient is one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

import numpy as np

from backends.wire import GenerateRequest
from client.connection import Model
from client.pieces import NO_MEDIA, Piece


class Backend(Protocol):
    """A part of AsyncClient."""

    def generate(
        self,
        pipeline: str,
        request: GenerateRequest,
        *,
        media: Mapping[str, np.ndarray] = NO_MEDIA,
        request_id: str | None = None,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> AsyncGenerator[Piece, None]: ...

    async def health(self, pipeline: str) -> dict[str, Any]: ...

    async def models(self) -> list[Model]: ...

    async def close(self) -> None: ...
