# SPDX-License-Identifier: Apache-2.0
"""What the proxy needs of a server; AsyncClient is one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

import numpy as np

from triton_omni.backends.wire import GenerateRequest
from triton_omni.connection import Model
from triton_omni.pieces import NO_MEDIA, Piece


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

    async def append(self, pipeline: str, token: str, text: str, *, ends: bool = False) -> None: ...

    async def health(self, pipeline: str) -> dict[str, Any]: ...

    async def requests(self, pipeline: str, request_id: str = "") -> dict[str, Any]: ...

    async def models(self) -> list[Model]: ...

    async def close(self) -> None: ...
