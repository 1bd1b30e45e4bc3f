# SPDX-License-Identifier: Apache-2.0
"""GET /v1/events: what the server is doing, once a second. Without the right of an operator no ids and no processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triton_omni.backends.wire import OmniError
from triton_omni.openai.http import sse
from triton_omni.openai.http.catalogue import Facts
from triton_omni.openai.http.context import RequestContext, context_of
from triton_omni.openai.http.errors import ApiError, of_omni

EVERY_S = 1.0
STATE = ("state", "live", "queued", "outputs", "error")
STAGE = ("state", "live", "ready", "instances", "restarts")


async def events(request: Request) -> Response:
    """A stream of views; with `?once=true` a single one as JSON."""
    context = context_of(request)
    if request.query_params.get("once", "").lower() in ("true", "1"):
        return JSONResponse(await view(context))
    return sse.response(_stream(context))


async def _stream(context: RequestContext) -> AsyncIterator[bytes]:
    while True:
        yield sse.data(await view(context))
        await asyncio.sleep(EVERY_S)


async def view(context: RequestContext) -> Facts:
    """The pipelines that the request's key may use, as they are now."""
    live = context.services.live
    await live.refresh()
    key = context.key
    is_operator = key is not None and key.key.operator
    allowed = {model: state for model, state in live.states.items() if key is None or key.may_use(model)}
    pipelines = {model: _pipeline(context, state, is_operator) for model, state in allowed.items()}
    if is_operator:
        for model, state in allowed.items():
            pipelines[model]["requests"] = await _requests(context, state["pipeline"])
    gpus = live.view.gpus()
    return {"time_s": time.time(), "pipelines": pipelines, "gpus": gpus} | ({"error": live.error} if live.error else {})


def _pipeline(context: RequestContext, state: Facts, is_operator: bool) -> Facts:
    name, live = state["pipeline"], context.services.live.view
    more = ("worker_pids", "stub_pids") if is_operator else ()
    stages: Facts = {}
    for stage, facts in state.get("stages", {}).items():
        stages[stage] = _only(facts, (*STAGE, *more)) | live.stage(name, stage)
        if not is_operator:
            del stages[stage]["workers"]
    return _only(state, STATE) | {"stages": stages} | live.pipeline(name)


def _only(facts: Facts, names: Iterable[str]) -> Facts:
    return {name: facts[name] for name in names if name in facts}


async def _requests(context: RequestContext, pipeline: str) -> list[Facts]:
    """Running requests; empty where the proxy has no operator's key of the server."""
    try:
        return (await context.services.backend.requests(pipeline)).get("requests", [])
    except OmniError:
        return []


async def trace(request: Request) -> Response:
    """GET /v1/events/{request}: waterfalls of ended requests with this id; for operators."""
    context = context_of(request)
    request_id = request.path_params["request"]
    if context.key is None or not context.key.key.operator:
        raise ApiError(403, "Only operators may see requests.", code="operator_only", kind="permission_error")
    try:
        pipelines = dict.fromkeys((await context.services.catalogue.models()).values())
        states = [await context.services.backend.requests(pipeline, request_id) for pipeline in pipelines]
    except OmniError as error:
        raise of_omni(error) from error
    traces = [
        {"pipeline": pipeline, **found}
        for pipeline, state in zip(pipelines, states, strict=True)
        for found in state.get("traces", ())
    ]
    if not traces:
        message = f"None of the latest ended requests has the id '{request_id[:100]}'."
        raise ApiError(404, message, code="request_not_found", param="request")
    return JSONResponse({"traces": traces})
