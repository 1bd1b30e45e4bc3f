# SPDX-License-Identifier: Apache-2.0
"""The models that clients may name, and the state of the pipelines behind them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from triton_omni.backends.wire import OmniError
from triton_omni.openai.backend import Backend
from triton_omni.openai.http.errors import ApiError, invalid, of_omni

FRESH_S = 2.0
OWNER = "triton-omni"
ENDPOINTS = {
    "chat": ("/v1/chat/completions", "/v1/responses"), "completion": ("/v1/completions",),
    "speech": ("/v1/audio/speech",), "transcription": ("/v1/audio/transcriptions",),
    "image": ("/v1/images/generations",), "edit": ("/v1/images/edits",),
}  # fmt: skip
"""Operation → the routes that need it."""
Facts = dict[str, Any]
"""A JSON object as a pipeline or this proxy reports it."""


class Catalogue:
    """Model id → pipeline: the configured names, else every public model of the server (asked every FRESH_S).

    `aliases` are further names of these.
    """

    def __init__(
        self,
        backend: Backend,
        configured: Mapping[str, str],
        aliases: Mapping[str, str] = {},
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._configured = dict(configured)
        self._aliases = aliases
        self._clock = clock
        self._listed: dict[str, str] = {}
        self._listed_s = float("-inf")
        self._media: dict[str, tuple[str, ...]] = {}
        self._edits: dict[str, bool] = {}
        self.created = int(time.time())

    async def models(self) -> dict[str, str]:
        """Model id → pipeline. Raises OmniError."""
        listed = self._configured or await self._public()
        return listed | {alias: listed.get(model, model) for alias, model in self._aliases.items()}

    async def _public(self) -> dict[str, str]:
        if self._clock() - self._listed_s > FRESH_S:
            self._listed = {m.name: m.name for m in await self._backend.models()}
            self._listed_s = self._clock()
        return self._listed

    async def pipeline_of(self, model: str) -> str:
        """The pipeline of a model id. Raises ApiError."""
        try:
            models = await self.models()
        except OmniError as error:
            raise of_omni(error) from error
        if model not in models:
            raise unknown_model(model, list(models))
        return models[model]

    async def check_media(self, model: str, kind: str, param: str) -> None:
        """Refuse content that the model does not take, before it is fetched or decoded. Raises ApiError."""
        pipeline = await self.pipeline_of(model)
        if pipeline not in self._media:
            state = await self._state(pipeline)
            about = state.get("about", {})
            if "media" not in about:
                return  # the pipeline does not answer: the call itself gets the error
            self._media[pipeline] = tuple(about["media"])
            self._edits[pipeline] = "edit" in state.get("operations", ())
        if kind not in self._media[pipeline]:
            taken = ", ".join(self._media[pipeline])
            raise invalid(param, f"The model '{model}' takes {taken}, not {kind}.", "unsupported_value")

    async def edits(self, model: str) -> bool:
        """True if the model, whose media were checked, edits the images that it is given."""
        return self._edits.get(await self.pipeline_of(model), False)

    async def states(self) -> dict[str, Facts]:
        """Model id → what its pipeline reports, or why it does not answer. Raises OmniError."""
        models = await self.models()
        states = await asyncio.gather(*(self._state(pipeline) for pipeline in models.values()))
        return dict(zip(models, states, strict=True))

    async def entry(self, model: str) -> Facts:
        """A model as OpenAI lists it, with our facts about it (voices, sample_rate, …). Raises ApiError."""
        state = await self._state(await self.pipeline_of(model))
        return self.entry_of(model, state)

    def entry_of(self, model: str, state: Mapping[str, Any]) -> Facts:
        """The same from a known state."""
        own = {"id": model, "object": "model", "created": self.created, "owned_by": OWNER}
        about = dict(state.get("about", {}))
        operations: list[str] = state.get("operations", [])
        endpoints = [path for operation in operations for path in ENDPOINTS.get(operation, ())]
        return {**about, **own, "ready": state["ready"], "operations": operations, "endpoints": endpoints}

    async def _state(self, pipeline: str) -> Facts:
        try:
            return await self._backend.health(pipeline)
        except OmniError as error:
            return {"pipeline": pipeline, "ready": False, "state": "unavailable", "error": error.line()}


def unknown_model(model: str, known: list[str]) -> ApiError:
    """The 404 for a model that does not exist."""
    names = ", ".join(known) or "none"
    message = f"The model '{model}' does not exist; available models: {names}."
    return ApiError(404, message, code="model_not_found", param="model")
