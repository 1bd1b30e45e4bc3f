# SPDX-License-Identifier: Apache-2.0
"""One view of the server for all who watch: read at most once a second, and only while someone watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from triton_omni.backends.wire import OmniError
from triton_omni.live_view import LiveView, MetricsPage
from triton_omni.openai.http.catalogue import Catalogue, Facts
from triton_omni.openai.http.metrics import triton_metrics

FRESH_S = 0.9


class LiveReadings:
    """The latest health of all pipelines, and the metrics of the last minute.

    states  model id → what its pipeline reports
    error   why there are none
    """

    def __init__(self, catalogue: Catalogue, metrics_url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.view = LiveView()
        self.states: dict[str, Facts] = {}
        self.error = ""
        self._catalogue = catalogue
        self._metrics_url = metrics_url
        self._clock = clock
        self._read_s = float("-inf")
        self._lock = asyncio.Lock()

    async def refresh(self) -> None:
        """Read again what is older than FRESH_S; concurrent callers share one reading."""
        async with self._lock:
            if self._clock() - self._read_s < FRESH_S:
                return
            text = await triton_metrics(self._metrics_url) if self._metrics_url else ""
            self.view.add(self._clock(), MetricsPage(text))
            try:
                self.states, self.error = await self._catalogue.states(), ""
            except OmniError as error:
                self.states, self.error = {}, error.line()
            self._read_s = self._clock()
