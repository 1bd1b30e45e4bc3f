# SPDX-License-Identifier: Apache-2.0
"""The proxy as an ASGI application: settings, routes and services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from triton_omni.backends.telemetry.traces import traces
from triton_omni.fetch import is_any, is_public
from triton_omni.openai.backend import Backend
from triton_omni.openai.endpoints import (
    chat,
    completions,
    edits,
    events,
    images,
    openapi,
    responses,
    speech,
    speech_stream,
    status,
    transcriptions,
    voices,
)
from triton_omni.openai.http.access import Access
from triton_omni.openai.http.budget import Budget
from triton_omni.openai.http.catalogue import Catalogue
from triton_omni.openai.http.context import Services
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.guard import Guard
from triton_omni.openai.http.live import LiveReadings
from triton_omni.openai.http.metrics import ProxyMetrics
from triton_omni.openai.http.pools import Pools
from triton_omni.openai.http.recordings import RecordingStore
from triton_omni.openai.http.settings import Settings
from triton_omni.openai.http.stored_responses import ResponseStore
from triton_omni.openai.http.transcripts import Transcripts
from triton_omni.openai.realtime.socket import create_client_secret, realtime

ROUTES = (
    Route("/v1/chat/completions", chat.complete, methods=["POST"]),
    Route("/v1/responses", responses.create, methods=["POST"]),
    Route("/v1/responses/{response}", responses.show),
    Route("/v1/responses/{response}", responses.delete, methods=["DELETE"]),
    Route("/v1/completions", completions.complete, methods=["POST"]),
    Route("/v1/embeddings", completions.embed, methods=["POST"]),
    Route("/v1/audio/speech", speech.speak, methods=["POST"]),
    WebSocketRoute("/v1/audio/speech/stream", speech_stream.stream_speech),
    WebSocketRoute("/v1/realtime", realtime),
    Route("/v1/realtime/client_secrets", create_client_secret, methods=["POST"]),
    Route("/dev/captioned_speech", speech.speak_captioned, methods=["POST"]),
    Route("/v1/audio/transcriptions", transcriptions.transcribe, methods=["POST"]),
    Route("/v1/audio/translations", transcriptions.translate, methods=["POST"]),
    Route("/v1/images/generations", images.generate, methods=["POST"]),
    Route("/v1/images/edits", edits.edit, methods=["POST"]),
    Route("/v1/audio/voices", voices.list_voices),
    Route("/v1/audio/voices", voices.add_voice, methods=["POST"]),
    Route("/v1/audio/voices/{name}", voices.show_voice),
    Route("/v1/audio/voices/{name}", voices.delete_voice, methods=["DELETE"]),
    Route("/v1/audio/voice_consents", voices.list_consents),
    Route("/v1/audio/voice_consents", voices.add_consent, methods=["POST"]),
    Route("/v1/audio/voice_consents/{name}", voices.show_consent),
    Route("/v1/audio/voice_consents/{name}", voices.rename_consent, methods=["POST"]),
    Route("/v1/audio/voice_consents/{name}", voices.delete_consent, methods=["DELETE"]),
    Route("/v1/audio/models", status.list_audio_models),
    Route("/v1/models", status.list_models),
    Route("/v1/models/{model:path}", status.show_model),
    Route("/v1/events", events.events),
    Route("/v1/events/{request:path}", events.trace),
    Route("/openapi.json", openapi.show),
    Route("/health", status.health),
    Route("/metrics", status.show_metrics),
)
EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-ignored-parameters", "x-ratelimit-limit-requests",
                   "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
                   "x-word-timestamps", "x-word-timestamps-omitted")  # fmt: skip


def make_app(backend: Backend, settings: Settings) -> Starlette:
    """The application over a backend, which it closes when it ends."""
    catalogue = Catalogue(backend, settings.models, settings.model_aliases)
    services = Services(
        backend=backend,
        catalogue=catalogue,
        live=LiveReadings(catalogue, settings.metrics_url),
        transcripts=Transcripts(),
        responses=ResponseStore(),
        pools=Pools(),
        budget=Budget(settings.limits.held_bytes),
        metrics=ProxyMetrics(settings.metrics_url),
        may_fetch=is_any if settings.private_urls else is_public,
        voice_aliases=settings.voice_aliases,
        access=Access(settings),
        recordings=None if settings.voices is None else RecordingStore(settings.voices),
        needs_consent=settings.needs_consent,
    )
    services.metrics.held_bytes.set_function(lambda: services.budget.held)
    tracer = traces("triton-omni-proxy")
    routes = frozenset(route.path for route in ROUTES)
    cors = Middleware(
        CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",), expose_headers=EXPOSED_HEADERS,
    )  # fmt: skip
    guard = Middleware(Guard, services=services, settings=settings, routes=routes, traces=tracer)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        yield
        services.pools.close()
        await backend.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    app = Starlette(
        routes=list(ROUTES),
        middleware=[cors, guard] if settings.cors_origins else [guard],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},  # pyright: ignore[reportArgumentType]
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # Guard takes paths with a slash at the end as those without
    app.state.access = services.access
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
