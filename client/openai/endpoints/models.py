# SPDX-License-Identifier: Apache-2.0
"""`/v1/models` and `/health`: which pipelines there are, and how they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triton_omni.backends import wire
from triton_omni.backends.wire import OmniError
from triton_omni.openai.backend import Backend
from triton_omni.openai.http.errors import RETRY_AFTER_S, ApiError, of_omni

FRESH_S = 2.0
OWNER = "triton-omni"


class Catalogue:
    """The models a client may name: those given as name=pipeline, else every public model of the server."""

    def __init__(self, source: Backend, given: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._given = dict(given)
        self._clock = clock
        self._found: dict[str, str] = {}
        self._found_s = float("-inf")
        self.created = int(time.time())

    async def models(self) -> dict[str, str]:
        """Model id → pipeline. Raises OmniError."""
        if self._given:
            return self._given
        if self._clock() - self._found_s > FRESH_S:
            self._found = {m.name: m.name for m in await self._source.models()}
            self._found_s = self._clock()
        return self._found

    async def pipeline_of(self, model: str) -> str:
        """The pipeline behind a model id. Raises ApiError."""
        try:
            models = await self.models()
        except OmniError as error:
            raise of_omni(error) from error
        if model not in models:
            raise unknown_model(model, list(models))
        return models[model]

    async def states(self) -> dict[str, dict[str, Any]]:
        """Model id → what its pipeline says about itself, or why it says nothing. Raises OmniError."""
        models = await self.models()
        states = await asyncio.gather(*(self._state(pipeline) for pipeline in models.values()))
        return dict(zip(models, states, strict=True))

    async def entry(self, model: str) -> dict[str, Any]:
        """A model as OpenAI lists it, with our facts about it (voices, sample_rate, …). Raises ApiError."""
        state = await self._state(await self.pipeline_of(model))
        return self.entry_of(model, state)

    def entry_of(self, model: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """The same from a known state."""
        own = {"id": model, "object": "model", "created": self.created, "owned_by": OWNER}
        about = dict(state.get("about", {}))
        return {**about, **own, "ready": state["ready"], "operations": state.get("operations", [])}

    async def _state(self, pipeline: str) -> dict[str, Any]:
        try:
            return await self._source.health(pipeline)
        except OmniError as error:
            return {"pipeline": pipeline, "ready": False, "error": error.line()}


def unknown_model(model: str, known: list[str]) -> ApiError:
    """The 404 for a model that is not there."""
    names = ", ".join(known) or "none"
    message = f"The model '{model}' does not exist; there are: {names}."
    return ApiError(404, message, code="model_not_found", param="model")


async def list_models(request: Request) -> Response:
    """GET /v1/models"""
    catalogue: Catalogue = request.app.state.shared.catalogue
    try:
        states = await catalogue.states()
    except OmniError as error:
        raise of_omni(error) from error
    entries = [catalogue.entry_of(model, state) for model, state in states.items()]
    return JSONResponse({"object": "list", "data": entries})


async def show_model(request: Request) -> Response:
    """GET /v1/models/{model}"""
    return JSONResponse(await request.app.state.shared.catalogue.entry(request.path_params["model"]))


async def health(request: Request) -> Response:
    """GET /health: 200 if every pipeline has a ready instance of every stage, else 503; details either way."""
    try:
        states = await request.app.state.shared.catalogue.states()
    except OmniError as error:
        return _health({}, error.line())
    return _health(states, "" if states else "the server has no pipelines")


def _health(states: dict[str, dict[str, Any]], trouble: str) -> Response:
    is_ready = bool(states) and all(state["ready"] for state in states.values())
    content: dict[str, Any] = {"status": "ok" if is_ready else "unavailable", "wire_version": wire.WIRE_VERSION}
    if trouble:
        content["error"] = trouble
    headers = {"cache-control": "no-store"} | ({} if is_ready else {"retry-after": f"{RETRY_AFTER_S:.0f}"})
    return JSONResponse({**content, "pipelines": states}, 200 if is_ready else 503, headers=headers)
