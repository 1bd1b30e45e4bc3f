# SPDX-License-Identifier: Apache-2.0
"""The proxy's own metrics, and Triton's as text."""

from __future__ import annotations

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TRITON_TIMEOUT_S = 5.0
CLIENT_GONE = 499


class ProxyMetrics:
    """Metrics by route; a route is one of the app's, so clients cannot invent labels.

    triton_url  Triton's metrics, appended to ours; "" for none
    """

    def __init__(self, triton_url: str = "") -> None:
        disable_created_metrics()
        self.triton_url = triton_url
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "omni_proxy_requests", "Requests that have ended; status 499: the client disconnected.",
            ("route", "status"), registry=self._registry,
        )  # fmt: skip
        self.in_flight = Gauge(
            "omni_proxy_requests_in_flight", "Requests being answered.", ("route",), registry=self._registry
        )
        self.first_byte = Histogram(
            "omni_proxy_first_byte_seconds", "From arrival to the first byte of the response body.",
            ("route",), buckets=BOUNDS_S, registry=self._registry,
        )  # fmt: skip
        self.held_bytes = Gauge(
            "omni_proxy_held_bytes", "Request bodies and decoded media held now.", registry=self._registry
        )

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()


async def triton_metrics(url: str) -> str:
    """Triton's own metrics as text, or a comment that says why they could not be read."""
    try:
        async with httpx.AsyncClient(timeout=TRITON_TIMEOUT_S, trust_env=False) as client:
            response = await client.get(url)
            response.raise_for_status()
            return response.text
    except httpx.HTTPError as error:
        return f"# Triton's metrics could not be read: {type(error).__name__}\n"
