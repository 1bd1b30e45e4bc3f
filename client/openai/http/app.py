# SPDX-License-Identifier: Apache-2.0
"""The proxy as an ASGI application: routes, and what they share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
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
from triton_omni.openai.endpoints import chat, edits, images, models, speech, transcriptions
from triton_omni.openai.endpoints.transcripts import Transcripts
from triton_omni.openai.http.bodies import Limits
from triton_omni.openai.http.calls import Shared
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.guard import Guard
from triton_omni.openai.http.metrics import Metrics, show_metrics
from triton_omni.openai.http.pools import Pools
from triton_omni.openai.http.tracing import Traced

ROUTES = (
    Route("/v1/chat/completions", chat.complete, methods=["POST"]),
    Route("/v1/audio/speech", speech.speak, methods=["POST"]),
    Route("/v1/audio/transcriptions", transcriptions.transcribe, methods=["POST"]),
    Route("/v1/audio/translations", transcriptions.translate, methods=["POST"]),
    Route("/v1/images/generations", images.generate, methods=["POST"]),
    Route("/v1/images/edits", edits.edit, methods=["POST"]),
    Route("/v1/models", models.list_models),
    Route("/v1/models/{model:path}", models.show_model),
    Route("/health", models.health),
    Route("/metrics", show_metrics),
)


@dataclass(frozen=True)
class Settings:
    """How the proxy is set up.

    models       model id → pipeline; empty: every public model of the server
    api_key      clients of /v1 must send it; empty: nobody is asked
    metrics_url  Triton's metrics page; empty: only our own numbers
    private_urls  media may be fetched from any address, also from inside this network
    limits       of what clients send
    """

    models: Mapping[str, str] = field(default_factory=dict[str, str])
    api_key: str = ""
    metrics_url: str = ""
    private_urls: bool = False
    limits: Limits = field(default_factory=Limits)


def make_app(backend: Backend, settings: Settings) -> Starlette:
    """The application over a backend, which it closes at its end."""
    metrics = Metrics()
    guard = Middleware(
        Guard,
        api_key=settings.api_key,
        metrics=metrics,
        routes=frozenset(route.path for route in ROUTES),
        limits=settings.limits,
    )

    pools = Pools()
    tracer = traces("triton-omni-proxy")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        pools.close()
        await backend.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    app = Starlette(
        routes=list(ROUTES),
        middleware=[Middleware(Traced, traces=tracer), guard],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},  # pyright: ignore[reportArgumentType]
        lifespan=lifespan,
    )
    may_fetch = is_any if settings.private_urls else is_public
    app.state.shared = Shared(backend, models.Catalogue(backend, settings.models), Transcripts(), pools, may_fetch)
    app.state.metrics = metrics
    app.state.metrics_url = settings.metrics_url
    return app


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
