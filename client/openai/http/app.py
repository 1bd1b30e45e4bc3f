# SPDX-License-Identifier: Apache-2.0
"""The proxy as an ASGI application: settings, routes and services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from triton_omni.backends.telemetry.traces import traces
from triton_omni.fetch import is_any, is_public
from triton_omni.openai.backend import Backend
from triton_omni.openai.endpoints import chat, edits, images, speech, status, transcriptions
from triton_omni.openai.http.bodies import BodyLimits
from triton_omni.openai.http.budget import Budget
from triton_omni.openai.http.catalogue import Catalogue
from triton_omni.openai.http.context import Services
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.guard import Guard
from triton_omni.openai.http.metrics import ProxyMetrics
from triton_omni.openai.http.pools import Pools
from triton_omni.openai.http.transcripts import Transcripts

ROUTES = (
    Route("/v1/chat/completions", chat.complete, methods=["POST"]),
    Route("/v1/audio/speech", speech.speak, methods=["POST"]),
    Route("/v1/audio/transcriptions", transcriptions.transcribe, methods=["POST"]),
    Route("/v1/audio/translations", transcriptions.translate, methods=["POST"]),
    Route("/v1/images/generations", images.generate, methods=["POST"]),
    Route("/v1/images/edits", edits.edit, methods=["POST"]),
    Route("/v1/models", status.list_models),
    Route("/v1/models/{model:path}", status.show_model),
    Route("/health", status.health),
    Route("/metrics", status.show_metrics),
)


@dataclass(frozen=True)
class Settings:
    """Options of the proxy.

    models        model id → pipeline; empty: every public model of the server
    api_key       required of clients of /v1; empty: none
    metrics_url   Triton's metrics; empty: only the proxy's own
    private_urls  media may be fetched from any address, including this network's own
    limits        bounds of request bodies
    """

    models: Mapping[str, str] = field(default_factory=dict[str, str])
    api_key: str = ""
    metrics_url: str = ""
    private_urls: bool = False
    limits: BodyLimits = field(default_factory=BodyLimits)


def make_app(backend: Backend, settings: Settings) -> Starlette:
    """The application over a backend, which it closes when it ends."""
    services = Services(
        backend=backend,
        catalogue=Catalogue(backend, settings.models),
        transcripts=Transcripts(),
        pools=Pools(),
        budget=Budget(settings.limits.held_bytes),
        metrics=ProxyMetrics(settings.metrics_url),
        may_fetch=is_any if settings.private_urls else is_public,
    )
    services.metrics.held_bytes.set_function(lambda: services.budget.held)
    tracer = traces("triton-omni-proxy")
    guard = Middleware(
        Guard,
        services=services,
        api_key=settings.api_key,
        routes=frozenset(route.path for route in ROUTES),
        limits=settings.limits,
        traces=tracer,
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        yield
        services.pools.close()
        await backend.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    return Starlette(
        routes=list(ROUTES),
        middleware=[guard],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},  # pyright: ignore[reportArgumentType]
        lifespan=lifespan,
    )


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own 404 and 405 in OpenAI's shape."""
    what = f"{request.method} {request.url.path}"
    message = {404: f"Unknown URL: {what}.", 405: f"Method not allowed: {what}."}.get(error.status_code, error.detail)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "invalid_value")
    response = ApiError(error.status_code, message, code=code).response()
    response.headers.update(error.headers or {})
    return response
