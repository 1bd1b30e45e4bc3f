# SPDX-License-Identifier: Apache-2.0
"""`/v1/models`, `/health` and `/metrics`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from triton_omni.backends import wire
from triton_omni.backends.wire import OmniError
from triton_omni.openai.http.catalogue import Facts
from triton_omni.openai.http.context import context_of
from triton_omni.openai.http.errors import RETRY_AFTER_S, of_omni
from triton_omni.openai.http.metrics import triton_metrics

AUDIO_OPERATIONS = {"speech", "transcription"}


async def list_models(request: Request) -> Response:
    """GET /v1/models"""
    return JSONResponse({"object": "list", "data": await _entries(request)})


async def list_audio_models(request: Request) -> Response:
    """GET /v1/audio/models: those that speak or transcribe. Open WebUI reads `models`."""
    entries = [entry for entry in await _entries(request) if AUDIO_OPERATIONS & set(entry["operations"])]
    return JSONResponse({"object": "list", "data": entries, "models": [{"id": entry["id"]} for entry in entries]})


async def _entries(request: Request) -> list[Facts]:
    catalogue = context_of(request).services.catalogue
    try:
        states = await catalogue.states()
    except OmniError as error:
        raise of_omni(error) from error
    key = context_of(request).key
    allowed = {model: state for model, state in states.items() if key is None or key.may_use(model)}
    return [catalogue.entry_of(model, state) for model, state in allowed.items()]


async def _entry(request: Request, model: str) -> Facts:
    context = context_of(request)
    if context.key is not None:
        context.key.check_model(model)
    return await context.services.catalogue.entry(model)


async def model_entries(request: Request, model: str | None) -> list[Facts]:
    """What is known of one model, or of all that the key may use. Raises ApiError."""
    return await _entries(request) if model is None else [await _entry(request, model)]


async def show_model(request: Request) -> Response:
    """GET /v1/models/{model}"""
    return JSONResponse(await _entry(request, request.path_params["model"]))


async def health(request: Request) -> Response:
    """GET /health: 200 if every pipeline can make an output, else 503; details for operators only."""
    context = context_of(request)
    with_details = context.key is not None and context.key.key.operator
    try:
        states = await context.services.catalogue.states()
    except OmniError as error:
        return _health({}, error.line(), with_details)
    return _health(states, "" if states else "the server has no pipelines", with_details)


def _health(states: dict[str, Facts], error: str, with_details: bool) -> Response:
    parts = {state["state"] for state in states.values()} or {"unavailable"}
    serves = "unavailable" not in parts
    content: Facts = {"status": "ok" if parts == {"ready"} else "degraded" if serves else "unavailable"}
    if with_details:
        content |= {"wire_version": wire.WIRE_VERSION, "pipelines": states} | ({"error": error} if error else {})
    headers = {"cache-control": "no-store"} | ({} if serves else {"retry-after": f"{RETRY_AFTER_S:.0f}"})
    return JSONResponse(content, 200 if serves else 503, headers=headers)


async def show_metrics(request: Request) -> Response:
    """GET /metrics: the proxy's, followed by Triton's where its address is configured."""
    metrics = context_of(request).services.metrics
    text = metrics.text()
    if metrics.triton_url:
        text += await triton_metrics(metrics.triton_url)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
