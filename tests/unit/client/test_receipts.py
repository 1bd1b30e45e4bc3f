# SPDX-License-Identifier: Apache-2.0
"""AsyncClient over a scripted gRPC stream: when it says what its consumer has read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from triton_omni import AsyncClient, connection
from triton_omni.backends.wire import Event, GenerateRequest, decode_request, encode_event

WAIT_S = 10.0


class Result:
    """A response as tritonclient hands it over."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def as_numpy(self, name: str) -> np.ndarray | None:
        return np.array([encode_event(self._event)], dtype=object) if name == "event" else None

    def get_response(self) -> Any:
        flag = type("Flag", (), {"bool_param": self._event.type == "end"})
        return type("Response", (), {"parameters": {"triton_final_response": flag}})


class ScriptedTriton:
    """Sends the events of `answer`; requests with the operation "acknowledge" go to `acknowledge`."""

    def __init__(self, answer: list[Event]) -> None:
        self.answer = answer
        self.requests: list[GenerateRequest] = []
        self.tokens: list[str] = []
        self.acknowledged = asyncio.Event()
        self.before: Callable[[], Any] = lambda: None

    def stream_infer(self, calls: Any, **_: object) -> Any:
        stream = self._stream(calls)
        return type("Call", (), {"__aiter__": lambda _: stream, "cancel": lambda _: None})()

    async def _stream(self, calls: Any) -> AsyncIterator[tuple[Result, None]]:
        call = await anext(calls)
        request = decode_request(call["inputs"][0]._get_content()[4:])
        self.requests.append(request)
        if request.operation != "acknowledge":
            for event in self.answer:
                yield Result(event), None
            return
        if (outcome := self.before()) is not None:
            await outcome
        self.tokens.append(request.target)
        self.acknowledged.set()
        yield Result(Event("end", outcome="completed")), None

    async def close(self) -> None:
        """Nothing is open."""


def pieces(*tokens: str) -> list[Event]:
    return [*(Event("text", index=i, acknowledge=token) for i, token in enumerate(tokens)), Event("end")]


def scripted(answer: list[Event]) -> tuple[AsyncClient, ScriptedTriton]:
    client, triton = AsyncClient("127.0.0.1:1"), ScriptedTriton(answer)
    client._triton = triton  # pyright: ignore[reportAttributeAccessIssue]
    return client, triton


def test_a_piece_is_acknowledged_when_the_next_one_is_asked_for() -> None:
    async def play() -> None:
        client, triton = scripted(pieces("", "a", "", "b"))
        stream = client.generate("toy", GenerateRequest())
        await anext(stream)
        await anext(stream)
        await asyncio.sleep(0)
        assert triton.tokens == [], "it has the piece, but may still be busy with it"
        await anext(stream)
        await asyncio.wait_for(triton.acknowledged.wait(), WAIT_S)
        assert triton.tokens == ["a"]
        assert [piece.event.type async for piece in stream] == ["text", "end"]
        await client.close()
        assert triton.tokens == ["a"], "an answer that is over needs none"
        assert triton.requests[0].acknowledge

    asyncio.run(play())


def test_one_call_at_a_time_for_the_latest_piece() -> None:
    async def play() -> None:
        go_on = asyncio.Event()
        client, triton = scripted(pieces("a", "b", "c", "d", ""))
        triton.before = go_on.wait
        stream = client.generate("toy", GenerateRequest())
        for _ in range(5):
            await anext(stream)
            await asyncio.sleep(0)
        assert len(triton.requests) == 2, "the answer and one acknowledgment"
        go_on.set()
        while triton.tokens != ["a", "d"]:
            triton.acknowledged.clear()
            await asyncio.wait_for(triton.acknowledged.wait(), WAIT_S)
        await stream.aclose()

    asyncio.run(play())


def test_a_failed_acknowledgment_is_repeated_while_the_answer_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRY_S", 0.001)
    failures = 0

    def fail_twice() -> None:
        nonlocal failures
        failures += 1
        if failures <= 2:
            raise connection.wire.from_line("[unavailable] the server restarts")

    async def play() -> None:
        client, triton = scripted(pieces("a", ""))
        triton.before = fail_twice
        stream = client.generate("toy", GenerateRequest())
        await anext(stream)
        await anext(stream)
        await asyncio.wait_for(triton.acknowledged.wait(), WAIT_S)
        assert (triton.tokens, failures) == (["a"], 3)

    asyncio.run(play())


def test_an_answer_that_is_left_leaves_no_call_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRY_S", 0.001)

    def fail() -> None:
        raise connection.wire.from_line("[unavailable] gone")

    async def play() -> None:
        client, triton = scripted(pieces("a", ""))
        triton.before = fail
        stream = client.generate("toy", GenerateRequest())
        await anext(stream)
        await anext(stream)
        await stream.aclose()
        await asyncio.wait_for(client.close(), WAIT_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())


def test_joined_answers_ask_for_no_acknowledgments() -> None:
    async def play() -> None:
        client, triton = scripted([Event("end")])
        assert len([piece async for piece in client.generate("toy", GenerateRequest(stream=False))]) == 1
        assert not triton.requests[0].acknowledge

    asyncio.run(play())
