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


async def list_models(request: Request) -> Response:
    """GET /v1/models"""
    catalogue = context_of(request).services.catalogue
    try:
        states = await catalogue.states()
    except OmniError as error:
        raise of_omni(error) from error
    entries = [catalogue.entry_of(model, state) for model, state in states.items()]
    return JSONResponse({"object": "list", "data": entries})


async def show_model(request: Request) -> Response:
    """GET /v1/models/{model}"""
    return JSONResponse(await context_of(request).services.catalogue.entry(request.path_params["model"]))


async def health(request: Request) -> Response:
    """GET /health: 200 if every pipeline has a ready instance of every stage, else 503; details either way."""
    try:
        states = await context_of(request).services.catalogue.states()
    except OmniError as error:
        return _health({}, error.line())
    return _health(states, "" if states else "the server has no pipelines")


def _health(states: dict[str, Facts], error: str) -> Response:
    is_ready = bool(states) and all(state["ready"] for state in states.values())
    content: Facts = {"status": "ok" if is_ready else "unavailable", "wire_version": wire.WIRE_VERSION}
    if error:
        content["error"] = error
    headers = {"cache-control": "no-store"} | ({} if is_ready else {"retry-after": f"{RETRY_AFTER_S:.0f}"})
    return JSONResponse({**content, "pipelines": states}, 200 if is_ready else 503, headers=headers)


async def show_metrics(request: Request) -> Response:
    """GET /metrics: the proxy's, followed by Triton's where its address is configured."""
    metrics = context_of(request).services.metrics
    text = metrics.text()
    if metrics.triton_url:
        text += await triton_metrics(metrics.triton_url)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
