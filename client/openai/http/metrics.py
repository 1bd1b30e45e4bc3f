# SPDX-License-Identifier: Apache-2.0
"""`/metrics`: the proxy's own numbers, and Triton's page below them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
PAGE_TIMEOUT_S = 5.0
CLIENT_GONE = 499


@dataclass
class Histogram:
    """Seconds in buckets."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def observe(self, value_s: float) -> None:
        """Count one value."""
        self.counts[bisect_left(BOUNDS_S, value_s)] += 1
        self.total_s += value_s


@dataclass
class Metrics:
    """Counts by route; a route is one of the app's, so clients cannot invent labels."""

    finished: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    in_flight: Counter[str] = field(default_factory=Counter[str])
    first_byte: dict[str, Histogram] = field(default_factory=dict[str, Histogram])
    held_bytes: Callable[[], int] = int
    """Of bodies and media, now."""

    def observe_first_byte(self, route: str, value_s: float) -> None:
        """Count the time from a request's arrival to the first byte of its answer's body."""
        self.first_byte.setdefault(route, Histogram()).observe(value_s)

    def page(self) -> str:
        """All numbers in Prometheus' text format."""
        lines = ["# HELP omni_proxy_requests_total Requests that have ended; status 499: the client went away."]
        lines.append("# TYPE omni_proxy_requests_total counter")
        for (route, status), count in sorted(self.finished.items()):
            lines.append(f'omni_proxy_requests_total{{route="{route}",status="{status}"}} {count}')
        lines.append("# HELP omni_proxy_requests_in_flight Requests being answered.")
        lines.append("# TYPE omni_proxy_requests_in_flight gauge")
        for route, count in sorted(self.in_flight.items()):
            lines.append(f'omni_proxy_requests_in_flight{{route="{route}"}} {count}')
        name = "omni_proxy_held_bytes"
        lines += [f"# HELP {name} Bodies and decoded media that are held.", f"# TYPE {name} gauge"]
        lines.append(f"{name} {self.held_bytes()}")
        name = "omni_proxy_first_byte_seconds"
        lines += [f"# HELP {name} From arrival to the first byte of the answer's body.", f"# TYPE {name} histogram"]
        for route, histogram in sorted(self.first_byte.items()):
            lines += _buckets(name, route, histogram)
        return "\n".join(lines) + "\n"


def _buckets(name: str, route: str, histogram: Histogram) -> list[str]:
    lines: list[str] = []
    count = 0
    for bound, in_bucket in zip((*map(str, BOUNDS_S), "+Inf"), histogram.counts, strict=True):
        count += in_bucket
        lines.append(f'{name}_bucket{{route="{route}",le="{bound}"}} {count}')
    lines.append(f'{name}_sum{{route="{route}"}} {histogram.total_s:.6f}')
    return [*lines, f'{name}_count{{route="{route}"}} {count}']


async def show_metrics(request: Request) -> Response:
    """GET /metrics"""
    page = request.app.state.metrics.page()
    url: str = request.app.state.metrics_url
    if url:
        page += await _triton_page(url)
    return PlainTextResponse(page, media_type="text/plain; version=0.0.4")


async def _triton_page(url: str) -> str:
    try:
        async with httpx.AsyncClient(timeout=PAGE_TIMEOUT_S, trust_env=False) as client:
            answer = await client.get(url)
            answer.raise_for_status()
            return answer.text
    except httpx.HTTPError as error:
        return f"# triton's metrics page could not be read: {type(error).__name__}\n"
