# SPDX-License-Identifier: Apache-2.0
"""What many large, slow and silent clients can do to the proxy: take what is theirs, and nothing of the others."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from starlette.types import Receive, Scope, Send

from tests.kit.fake_backend import FakeBackend
from tests.kit.proxy_server import RunningProxy, running_app, running_proxy
from triton_omni import Media, MediaError
from triton_omni.openai.endpoints import messages
from triton_omni.openai.http.bodies import FREE_BYTES
from triton_omni.openai.http.protocol import Protocol
from triton_omni.openai.http.settings import BodyLimits, Settings

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
MIB = 1 << 20


def ask(proxy: RunningProxy, nbytes: int = 0) -> httpx.Response:
    """A chat whose body is filled up with white space."""
    return httpx.post(f"{proxy.root}/v1/chat/completions", content=httpx.Request("POST", "x", json=CHAT).content
                      + b" " * nbytes, timeout=30)  # fmt: skip


def held(proxy: RunningProxy) -> int:
    page = httpx.get(f"{proxy.root}/metrics").text
    return next(int(float(line.split()[1])) for line in page.splitlines() if line.startswith("omni_proxy_held_bytes "))


def wait_until_held(proxy: RunningProxy, nbytes: int) -> None:
    end_s = time.monotonic() + 20
    while (now := held(proxy)) != nbytes:
        assert time.monotonic() < end_s, f"{now} bytes are held, not {nbytes}"


@contextmanager
def unfinished(proxy: RunningProxy, nbytes: int, sent: int) -> Iterator[socket.socket]:
    """A client that has sent a part of its body."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {nbytes}\r\n\r\n"
        connection.sendall(head.encode() + b" " * sent)
        yield connection


def image(side: int) -> Any:
    """A message with an image that takes 3 * side * side bytes."""
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_bodies_share_a_budget_and_short_ones_go_on(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(limits=BodyLimits(held_bytes=4 * MIB))) as proxy:
        with unfinished(proxy, 4 * MIB, 3 * MIB):
            wait_until_held(proxy, 3 * MIB - FREE_BYTES)
            full = ask(proxy, 2 * MIB)
            assert (full.status_code, full.headers["retry-after"]) == (503, "1")
            assert full.json()["error"]["code"] == "overloaded"
            assert ask(proxy).status_code == 200
            assert ask(proxy, MIB).status_code == 200
            wait_until_held(proxy, 3 * MIB - FREE_BYTES)
        wait_until_held(proxy, 0)
        with unfinished(proxy, 4 * MIB, 3 * MIB):
            wait_until_held(proxy, 3 * MIB - FREE_BYTES)
            with unfinished(proxy, 4 * MIB, 2 * MIB) as refused:
                refused.sendall(b" " * MIB)
                wait_until_held(proxy, 3 * MIB - FREE_BYTES)  # it is read to its end, and not kept
                assert ask(proxy, MIB).status_code == 200
        wait_until_held(proxy, 0)
        assert ask(proxy, 2 * MIB).status_code == 200
        never = ask(proxy, 5 * MIB)
        assert (never.status_code, never.json()["error"]["code"]) == (413, "content_too_large")
    assert len(backend.seen) == 4


def test_media_are_counted_until_the_answer_ends_and_bodies_until_they_are_read(backend: FakeBackend) -> None:
    backend.hold_after = 1
    with running_proxy(backend, Settings(limits=BodyLimits(held_bytes=2 * MIB))) as proxy, proxy.sdk() as sdk:
        ask_about = sdk.chat.completions.create
        with closing(ask_about(model="fake", messages=image(700), stream=True)) as stream:
            next(iter(stream))
            wait_until_held(proxy, 3 * 700 * 700)
            with pytest.raises(openai.InternalServerError) as full:
                ask_about(model="fake", messages=image(600))
            assert (full.value.status_code, full.value.code) == (503, "overloaded")
        wait_until_held(proxy, 0)
        with pytest.raises(openai.APIStatusError) as never:
            ask_about(model="fake", messages=image(900))
        assert never.value.status_code == 413
        with pytest.raises(openai.APIStatusError) as many:
            ask_about(model="fake", messages=image(600), n=2)
        assert many.value.status_code == 413, "each run sends the image"
        wait_until_held(proxy, 0)


def test_a_body_that_turns_out_too_large_gives_its_room_back_at_once(backend: FakeBackend) -> None:
    limits = BodyLimits(body_bytes=2 * MIB, held_bytes=4 * MIB)
    with (
        running_proxy(backend, Settings(limits=limits)) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as connection,
    ):
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        connection.sendall(b"%x\r\n" % (4 * MIB) + b" " * MIB)
        wait_until_held(proxy, MIB - FREE_BYTES)
        connection.sendall(b" " * 2 * MIB)
        wait_until_held(proxy, 0)  # while the rest is still coming
        connection.sendall(b" " * MIB + b"\r\n0\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_what_is_decoded_for_a_client_that_has_gone_is_not_held(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def slowly(media: Media, data: bytes) -> Any:
        begun.set()
        assert go_on.wait(30)
        try:
            return media.image(np.zeros((700, 700, 3), np.uint8))
        finally:
            over.set()

    monkeypatch.setitem(messages._ADD, "image", slowly)
    body = httpx.Request("POST", "http://x", json={"model": "fake", "messages": image(8)}).content
    with running_proxy(backend, Settings(limits=BodyLimits(held_bytes=2 * MIB))) as proxy:
        with unfinished(proxy, len(body), 0) as leaving:
            leaving.sendall(body)
            assert begun.wait(30)
        end_s = time.monotonic() + 20
        while 'route="/v1/chat/completions",status="499"' not in httpx.get(f"{proxy.root}/metrics").text:
            assert time.monotonic() < end_s
        go_on.set()
        assert over.wait(30) and held(proxy) == 0


def test_a_body_that_stops_arriving(backend: FakeBackend) -> None:
    with (
        running_proxy(backend, Settings(limits=BodyLimits(silence_s=0.3))) as proxy,
        unfinished(proxy, 1000, 10) as silent,
    ):
        assert silent.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        while silent.recv(1 << 16):
            pass  # the proxy closes it
        assert ask(proxy).status_code == 200
    assert len(backend.seen) == 1


def test_a_body_that_arrives_byte_by_byte(backend: FakeBackend) -> None:
    limits = BodyLimits(silence_s=0.5, bytes_per_s=1000)
    with running_proxy(backend, Settings(limits=limits)) as proxy, unfinished(proxy, 1000, 1) as slow:
        slow.settimeout(0.05)
        answer = b""
        for _ in range(200):
            slow.sendall(b" ")
            try:
                answer = slow.recv(1 << 16)
                break
            except TimeoutError:
                continue
        slow.settimeout(30.0)
        while part := slow.recv(1 << 16):  # the head may come before the body
            answer += part
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"request_timeout"' in answer


def test_a_head_that_does_not_arrive(proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protocol, "head_s", 0.5)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health")  # after an answer as at the beginning
        answer = b""
        while part := slow.recv(1 << 16):
            answer += part
        assert answer.count(b"HTTP/1.1") == 1


def test_an_answer_that_takes_long_is_not_cut_off(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protocol, "head_s", 1.0)
    backend.hold_after = 1
    with running_proxy(backend, keep_alive_s=1) as proxy, pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{proxy.root}/v1/chat/completions", json=CHAT, timeout=httpx.Timeout(10, read=2.5))
    assert len(backend.seen) == 1


def test_a_client_that_reads_nothing_does_not_fill_the_socket_with_megabytes() -> None:
    """What the kernel takes counts as read. It takes 4 MiB where nothing bounds it."""
    taken, is_full = 0, threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal taken
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while taken < 64 * MIB:
                async with asyncio.timeout(1):
                    await send({"type": "http.response.body", "body": bytes(1 << 14), "more_body": True})
                taken += 1 << 14
        except TimeoutError:
            is_full.set()

    with running_app(app) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert is_full.wait(30)
    assert taken < 2 * MIB


@pytest.mark.parametrize("kind", ["names", "videos"])
def test_slow_work_of_one_kind_delays_no_other(
    proxy: RunningProxy, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """More of it than there are threads, in look-ups of hosts or in videos."""
    go_on, begun = threading.Event(), threading.Semaphore(0)

    look_up = socket.getaddrinfo

    def stand_still(first: Any, *others: Any, **more: Any) -> Any:
        if first == "127.0.0.1":
            return look_up(first, *others, **more)
        begun.release()
        go_on.wait(30)
        raise MediaError("no video") if kind == "videos" else OSError("no host")

    url = "http://silent.test/x" if kind == "names" else "data:video/mp4;base64,AAAA"
    if kind == "names":
        monkeypatch.setattr(socket, "getaddrinfo", stand_still)
    else:
        monkeypatch.setitem(messages._ADD, "video", stand_still)
    body = {"model": "fake", "messages": [
        {"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]},
    ]}  # fmt: skip
    statuses: list[int] = []

    def post() -> None:
        statuses.append(httpx.post(f"{proxy.root}/v1/chat/completions", json=body, timeout=40).status_code)

    waiting = [threading.Thread(target=post) for _ in range(20)]
    try:
        for thread in waiting:
            thread.start()
        for _ in range(2):
            assert begun.acquire(timeout=20)
        with proxy.sdk() as sdk:
            seen = sdk.chat.completions.create(model="fake", messages=image(8))
            assert seen.choices[0].message.content
            assert sdk.images.generate(model="painter", prompt="a fox").data
    finally:
        go_on.set()
        for thread in waiting:
            thread.join(40)
    assert statuses == [400] * 20


def test_media_tensors_are_no_copies() -> None:
    claimed: list[int] = []
    media = Media(claimed.append)
    first, second = (np.full((2, 2, 3), i, np.uint8) for i in (1, 2))
    media.image(first)
    assert np.shares_memory(media.tensors["image"], first)
    assert media.image(second).offset == 12
    whole = media.tensors["image"]
    assert whole.tolist() == [1] * 12 + [2] * 12 and media.tensors["image"] is whole
    assert claimed == [12, 12]
