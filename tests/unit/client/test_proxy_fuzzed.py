# SPDX-License-Identifier: Apache-2.0
"""Mutated and generated requests of every route: nothing but 2xx, 4xx and 503 with Retry-After may come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from tests.kit.fake_backend import FakeBackend
from tests.kit.request_mutations import (
    READ_ROUTES,
    REFUSING,
    ROUTES,
    Mutant,
    fault_of,
    mutants,
    preparations,
    undoing,
)
from triton_omni.backends import wire
from triton_omni.backends.wire import GenerateRequest
from triton_omni.openai.endpoints import openapi
from triton_omni.openai.http.app import make_app
from triton_omni.openai.http.settings import BodyLimits, Settings
from triton_omni.pieces import Piece

MUTANTS = 250
GENERATED = 15
DOCUMENT = Path(__file__).parents[3] / "docs/openapi.json"


class SmallBackend(FakeBackend):
    """Answers are short, and a request is read as a server reads it: what cannot be encoded fails here."""

    def _pieces(self, request: GenerateRequest) -> Iterator[Piece]:
        request = wire.decode_request(wire.encode_request(request))
        pixels = (request.image.width or 1) * (request.image.height or 1)
        if pixels > 1 << 16:
            raise wire.BadRequest("images must be smaller here", "image.width")
        sampling = msgspec.structs.replace(request.sampling, max_tokens=min(request.sampling.max_tokens or 3, 9))
        return super()._pieces(msgspec.structs.replace(request, sampling=sampling))


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Starlette:
    settings = Settings(limits=BodyLimits(body_bytes=4 << 20), voices=tmp_path_factory.mktemp("voices"))
    return make_app(SmallBackend(), settings)


@pytest.mark.parametrize("route", [*ROUTES, *READ_ROUTES])
def test_mutants(app: Starlette, route: str, caplog: pytest.LogCaptureFixture) -> None:
    async def send_all() -> list[tuple[str, Mutant]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            faults = list[tuple[str, Mutant]]()
            for options in preparations():
                await client.request(**options)
            for mutant in mutants(route, "fake", MUTANTS):
                answer = await client.request(**mutant.options())
                statuses.append(answer.status_code)
                if fault := fault_of(answer):
                    faults.append((fault, mutant))
                for options in undoing(mutant, answer):
                    assert (await client.request(**options)).status_code == 200
            return faults

    statuses: list[int] = []
    with caplog.at_level(logging.ERROR, "triton_omni.proxy"):
        faults = asyncio.run(send_all())
    assert not faults, f"{len(faults)} faults, first: {faults[0]}"
    assert not caplog.records, "an unexpected error was logged"
    if route not in REFUSING and route in ROUTES:
        assert 0.02 < sum(status < 300 for status in statuses) / MUTANTS < 0.9, (
            "mutants are neither all valid nor all broken"
        )


def test_generated_requests(app: Starlette) -> None:
    hypothesis = pytest.importorskip("hypothesis", reason="make setup installs it")
    schemathesis = pytest.importorskip("schemathesis", reason="make setup installs it")
    schema = schemathesis.openapi.from_dict(msgspec.json.decode(openapi.document()))
    schema.app = app
    for path in (*openapi.BODIES, *openapi.FORMS):
        strategy = schema[path]["POST"].as_strategy()

        @hypothesis.given(case=strategy)
        @hypothesis.settings(
            max_examples=GENERATED, derandomize=True, database=None, deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        def sends(case: Any) -> None:
            response = case.call()
            assert response.status_code < 500 or (response.status_code == 503 and response.headers["retry-after"])

        sends()


def test_the_document_is_served_and_fresh(app: Starlette) -> None:
    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.get("/openapi.json")

    assert asyncio.run(get()).content == DOCUMENT.read_bytes(), (
        "run: python -m triton_omni.openai.endpoints.openapi docs/openapi.json"
    )


def test_the_document_describes_every_route(app: Starlette) -> None:
    described = set(msgspec.json.decode(openapi.document())["paths"])
    served = {route.path.replace(":path}", "}") for route in app.routes if isinstance(route, Route)}
    assert served - described == {"/v1/audio/translations"}
    assert described == {"/v1/events", *ROUTES, *(route.removeprefix("GET ") for route in READ_ROUTES)}, (
        "mutants of all"
    )
