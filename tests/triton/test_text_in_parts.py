# SPDX-License-Identifier: Apache-2.0
"""Speech of a text that streams in, through a real server: as the whole text's, interrupted, and under load."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.kit.server_calls import wait_until_idle
from tests.kit.triton_server import RunningServer
from triton_omni import AsyncClient, Client
from triton_omni.backends.wire import GenerateRequest, OmniError
from triton_omni.pieces import Piece

pytestmark = [pytest.mark.triton, pytest.mark.timeout(120)]

PARTS = ("Hel", "lo there,", " here", " are ", "seven words in ", "all", "")


def whole(server: RunningServer, text: str) -> np.ndarray:
    with Client(server.grpc) as client:
        pieces = list(client.generate("toy", GenerateRequest("speech", input=text)))
    return samples(pieces)


def samples(pieces: list[Piece]) -> np.ndarray:
    return np.concatenate([piece.audio for piece in pieces if piece.audio is not None])


async def streamed(client: AsyncClient, parts: tuple[str, ...] = PARTS) -> list[Piece]:
    """Each part is added when the audio of the words before it has come."""
    pieces, token, said = list[Piece](), "", ""
    rest = list(parts)

    async def add() -> None:
        nonlocal said
        said += rest[0]
        await client.append("toy", token, rest.pop(0), ends=not rest)

    async for piece in client.generate("toy", GenerateRequest("speech", open_input=True)):
        pieces.append(piece)
        token = token or piece.event.token
        audible = len(said.split()) - (not said.endswith(" ")) if said else 0
        while rest and sum(p.audio is not None for p in pieces) >= audible:
            await add()
            audible = len(said.split()) - (not said.endswith(" "))
    return pieces


async def append_often(client: AsyncClient, token: str) -> None:
    """The server sees within 20 ms that a client has left; a call takes 1 ms at least."""
    for _ in range(500):
        await client.append("toy", token, "three ")


def test_a_text_in_parts_is_spoken_as_the_whole_while_it_comes(toy: RunningServer) -> None:
    async def run() -> list[Piece]:
        async with AsyncClient(toy.grpc) as client:
            return await streamed(client)

    pieces = asyncio.run(run())
    assert pieces[0].event.type == "accepted" and pieces[-1].event.outcome == "completed"
    np.testing.assert_array_equal(samples(pieces), whole(toy, "".join(PARTS)))


def test_a_listener_who_leaves_ends_the_runs(toy: RunningServer) -> None:
    async def run() -> None:
        async with AsyncClient(toy.grpc) as client:
            pieces = client.generate("toy", GenerateRequest("speech", input="one two ", open_input=True))
            token = (await anext(pieces)).event.token
            assert (await anext(pieces)).audio is not None
            await pieces.aclose()
            with pytest.raises(OmniError, match="has ended"):
                await append_often(client, token)

    asyncio.run(run())
    wait_until_idle(toy)


def test_forty_texts_at_once_keep_their_words(toy: RunningServer) -> None:
    async def run() -> list[list[Piece]]:
        async with AsyncClient(toy.grpc) as client:
            texts = [tuple(f"w{k} " * (1 + i % 3) for k in range(1 + i % 5)) for i in range(40)]
            return await asyncio.gather(*(streamed(client, parts) for parts in texts))

    answers = asyncio.run(run())
    one_word = len(whole(toy, "word"))
    for i, pieces in enumerate(answers):
        assert len(samples(pieces)) == one_word * (1 + i % 5) * (1 + i % 3)
    wait_until_idle(toy)
