# SPDX-License-Identifier: Apache-2.0
"""Loads of concurrent clients in this process: gRPC streams of tritonclient, and HTTP streams of the OpenAI API.

Both give `measures.RequestTrace`s, so that a server, a proxy and another OpenAI server are measured alike.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import numpy as np
import tritonclient.grpc as sync_grpc
import tritonclient.grpc.aio as grpc

from perf.measures import Piece, RequestTrace

TIMEOUT_S = 300.0
PCM16_BYTES_PER_S = 2 * 24_000  # what the proxy sends as pcm16

One = Callable[[int], Awaitable[RequestTrace]]


async def crowd(one: One, streams: int, count: int) -> list[RequestTrace]:
    """`count` requests, `streams` at a time; number n is given to `one`."""
    numbers = iter(range(count))

    async def client() -> list[RequestTrace]:
        return [await asyncio.wait_for(one(number), TIMEOUT_S) for number in numbers]

    found = await asyncio.gather(*(client() for _ in range(min(streams, count))))
    return [trace for traces in found for trace in traces]


@dataclass
class _Watch:
    """One request being watched."""

    start_s: float = field(default_factory=time.monotonic)
    pieces: list[Piece] = field(default_factory=list[Piece])

    def saw(self, output: str, audio_s: float = 0.0) -> None:
        self.pieces.append(Piece(time.monotonic(), output, audio_s))

    def trace(self, completed: bool) -> RequestTrace:
        return RequestTrace(self.start_s, self.pieces, time.monotonic(), completed)


def over_grpc(
    url: str, model: str, body: Callable[[int], dict[str, Any]], streams: int, count: int
) -> list[RequestTrace]:
    """`count` requests to a public model, each on a stream of its own; `body(n)` is a GenerateRequest."""

    async def load() -> list[RequestTrace]:
        async with grpc.InferenceServerClient(url) as client:

            async def one(number: int) -> RequestTrace:
                return await _grpc_request(client, model, body(number))

            return await crowd(one, streams, count)

    return asyncio.run(load())


async def _grpc_request(client: grpc.InferenceServerClient, model: str, body: dict[str, Any]) -> RequestTrace:
    tensor = sync_grpc.InferInput("request", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([json.dumps(body).encode()], object))

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": [tensor], "enable_empty_final_response": True}

    watch, completed = _Watch(), False
    responses = cast(
        "AsyncIterator[tuple[sync_grpc.InferResult | None, Exception | None]]", client.stream_infer(requests())
    )
    async for result, error in responses:
        if error is not None or result is None:
            return watch.trace(False)
        raw = result.as_numpy("event")
        if raw is None or not raw.size:
            continue
        event = json.loads(raw.reshape(-1)[0])
        kind = event.get("type")
        if kind == "audio":
            watch.saw(kind, event["piece"]["samples"] / event["piece"]["sample_rate"])
        elif kind in ("text", "image"):
            watch.saw(kind)
        completed = completed or (kind == "end" and event.get("outcome") == "completed")
    return watch.trace(completed)


def over_http(root: str, body: Callable[[int], dict[str, Any]], streams: int, count: int) -> list[RequestTrace]:
    """`count` streamed chat completions at `root` ("http://127.0.0.1:9000"); `body(n)` is the JSON body without
    `stream`."""

    async def load() -> list[RequestTrace]:
        limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
        async with httpx.AsyncClient(base_url=root, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:

            async def one(number: int) -> RequestTrace:
                return await _http_request(client, body(number) | {"stream": True})

            return await crowd(one, streams, count)

    return asyncio.run(load())


async def _http_request(client: httpx.AsyncClient, body: dict[str, Any]) -> RequestTrace:
    watch, done = _Watch(), False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == line or not data:
                continue
            if data == "[DONE]":
                done = True
                continue
            for choice in json.loads(data).get("choices", ()):
                delta = choice["delta"]
                audio = delta.get("audio") or {}
                if delta.get("content") or audio.get("transcript"):  # the text of an answer with speech is there
                    watch.saw("text")
                if audio.get("data"):
                    watch.saw("audio", len(base64.b64decode(audio["data"])) / PCM16_BYTES_PER_S)
    return watch.trace(done)
