# SPDX-License-Identifier: Apache-2.0
"""Clients that read nothing of an endless stream: the memory of all processes stays within `max_output_bytes`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.kit.idle_clients import check_memory_of_waiting_clients
from tests.kit.load_generator import Plan, body, run_one
from tests.kit.proxy_server import proxy_process
from tests.kit.server_calls import health, idle, pss_mib
from tests.kit.triton_server import RunningServer, running_server, toy_repository, wait_for
from triton_omni import AsyncClient, Piece
from triton_omni.backends.wire import decode_request

pytestmark = pytest.mark.triton

CLIENTS = 16
SLACK_MIB = 64.0
FILL_S = 6.0
ENDLESS = 1_000_000
SECONDS = float(os.environ.get("TRITON_OMNI_UNREAD_S", "60"))
DEPLOY = "pipeline: toy\norchestrator: {max_output_bytes: %d}\nstages: {tokens: {}, frames: {}, wave: {}}\n"


@dataclass
class Scene:
    """A toy server and a proxy for it."""

    server: RunningServer
    proxy_port: int
    proxy_pid: int

    def pss(self) -> float:
        """MiB of all processes, shared pages counted once."""
        return pss_mib([*self.server.processes(), self.proxy_pid])


@contextmanager
def scene(folder: Path, max_output_bytes: int) -> Iterator[Scene]:
    with (
        running_server([toy_repository(folder, DEPLOY % max_output_bytes)]) as server,
        proxy_process("--triton", server.grpc) as proxy,
    ):
        wait_for(lambda: idle(server), 30, "idle")
        made = Scene(server, proxy.port, proxy.pid)
        for start in READERS:  # links, threads and pools exist before anything is measured
            with start(made, 1), start(made, 1):
                wait_for(lambda: health(server)["live"] >= 2, 20, "two streams")
            wait_for(lambda: idle(server), 20, "idle again")
        yield made


# --- clients that never read, by kind ----------------------------------------------------------------------------
@contextmanager
def bare_grpc(scene: Scene, count: int) -> Iterator[None]:
    """As tritonclient and perf_analyzer: no acknowledgments. Nothing is taken from the stream's iterator."""
    with ExitStack() as stack:
        for _ in range(count):
            request = service_pb2.ModelInferRequest(model_name="toy")
            request.inputs.add(name="request", datatype="BYTES", shape=[1])
            data = json.dumps(body(ENDLESS)).encode()
            request.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
            channel = stack.enter_context(grpc.insecure_channel(scene.server.grpc))
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]))
            stack.callback(call.cancel)
        yield


@contextmanager
def our_client(scene: Scene, count: int) -> Iterator[None]:
    """AsyncClient, whose consumer takes the first piece and no other."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    held: list[tuple[AsyncClient, AsyncGenerator[Piece, None]]] = []

    async def begin() -> None:
        client = AsyncClient(scene.server.grpc)
        stream = client.generate("toy", decode_request(json.dumps(body(ENDLESS)).encode()))
        held.append((client, stream))
        await anext(stream)

    async def leave() -> None:
        for client, stream in held:
            await stream.aclose()
            await client.close()

    try:
        for _ in range(count):
            asyncio.run_coroutine_threadsafe(begin(), loop).result(30)
        yield
    finally:
        asyncio.run_coroutine_threadsafe(leave(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextmanager
def proxy_client(scene: Scene, count: int) -> Iterator[None]:
    """A stream of the OpenAI proxy, on a socket that is never read."""
    content: dict[str, Any] = {
        "model": "toy", "stream": True, "max_tokens": ENDLESS, "messages": [{"role": "user", "content": "go"}],
        "modalities": ["text", "audio"], "audio": {"voice": "sine", "format": "pcm16"},
    }  # fmt: skip
    data = json.dumps(content).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", scene.proxy_port)))
            connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            connection.settimeout(30)
            begun = connection.recv(1 << 10, socket.MSG_PEEK)  # looked at, not taken
            assert begun.startswith(b"HTTP/1.1 200"), begun
        yield


def read_whole(scene: Scene, pieces: int) -> list[int]:
    """Indices of the pieces of a stream of many windows that our client reads as fast as it can."""

    async def read() -> list[int]:
        request = decode_request(json.dumps(body(pieces, ("audio",))).encode())
        async with AsyncClient(scene.server.grpc) as client:
            events = [piece.event async for piece in client.generate("toy", request, timeout_s=60)]
        return [event.index or 0 for event in events if event.type == "audio"]

    return asyncio.run(read())


READERS = (bare_grpc, our_client, proxy_client)


@contextmanager
def all_kinds(scene: Scene) -> Iterator[None]:
    with ExitStack() as stack:
        for i, start in enumerate(READERS):
            stack.enter_context(start(scene, CLIENTS // 3 + (i < CLIENTS % 3)))
        wait_for(lambda: health(scene.server)["live"] == CLIENTS, 30, f"{CLIENTS} streams")
        yield


def most_memory(scene: Scene, seconds: float) -> float:
    """Largest sum of all processes while the clients do not read, in MiB."""
    most, until = 0.0, time.monotonic() + seconds
    pace = threading.Event()  # never set
    while time.monotonic() < until:
        most = max(most, scene.pss())
        pace.wait(0.5)
    return most


def first_output_s(scene: Scene) -> float:
    life = run_one(scene.server.grpc, Plan(body(2, ("text",)), timeout_s=30))
    assert life.ends == ["length"] and life.first_s is not None
    return life.first_s


def test_what_16_clients_do_not_read_is_bounded(tmp_path: Path) -> None:
    """Fifteen seconds are enough for 200 MiB where nothing is bounded."""
    limit = 1 << 20
    with scene(tmp_path, limit) as running:
        before = running.pss()
        with all_kinds(running):
            most = most_memory(running, 15)
            assert first_output_s(running) < 10
            assert read_whole(running, 2000) == list(range(2000)), "8 windows: it acknowledges what it reads"
        wait_for(lambda: idle(running.server), 20, "nothing is left of them")
    assert most <= before + CLIENTS * limit / (1 << 20) + SLACK_MIB


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 600)
def test_a_minute_of_16_clients_that_do_not_read(tmp_path: Path) -> None:
    limit = 8 << 20
    with scene(tmp_path, limit) as running:
        before = running.pss()
        with all_kinds(running):
            most = most_memory(running, SECONDS)
        wait_for(lambda: idle(running.server), 30, "nothing is left of them")
        ratios: list[float] = []
        for _ in range(3):  # pairs: with and without them
            alone = statistics.median(first_output_s(running) for _ in range(30))
            with all_kinds(running):
                most_memory(running, FILL_S)  # until then they are served at full speed: nothing is unread yet
                beside = statistics.median(first_output_s(running) for _ in range(30))
            wait_for(lambda: idle(running.server), 30, "idle")
            ratios.append(beside / alone)
    print(f"idle {before:.0f} MiB, most {most:.0f} MiB, first output beside / alone {ratios}")
    assert most <= before + CLIENTS * limit / (1 << 20) + SLACK_MIB
    assert statistics.median(ratios) <= 1.2


@pytest.mark.soak
def test_memory_of_a_proxy_whose_clients_wait(toy: RunningServer) -> None:
    chat = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9,
            "stages": {"tokens": {"hold_after": 2}}}  # fmt: skip
    with proxy_process("--triton", toy.grpc) as proxy:
        check_memory_of_waiting_clients(proxy.port, proxy.pid, chat)
    wait_for(lambda: idle(toy), 30, "nothing is left of them")
