# SPDX-License-Identifier: Apache-2.0
"""Large media of one client beside small requests of another."""

from __future__ import annotations

import base64
import io
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.kit.fake_backend import FakeBackend
from triton_omni import Media
from triton_omni.backends.wire import Part
from triton_omni.media import is_large
from triton_omni.openai.http.pools import LARGE_NICENESS, Pools

WAIT_S = 20.0
LARGE = 1500
"""Side of an image with more than LARGE_PIXELS."""


def png(side: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (side, side), (9, 8, 7, 128)[: len(mode)]).save(file, "png")
    return file.getvalue()


def asking(data: bytes) -> list[dict[str, object]]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_small_images_do_not_wait_for_large_ones(
    sdk: openai.OpenAI, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, begun, decode = threading.Event(), threading.Semaphore(0), Media.image

    def held(media: Media, image: bytes) -> Part:
        if is_large(image):
            begun.release()
            assert go_on.wait(WAIT_S)
        return decode(media, image)

    monkeypatch.setattr("triton_omni.openai.endpoints.messages._ADD", {"image": held})
    ask = lambda data: sdk.chat.completions.create(model="fake", messages=asking(data))  # type: ignore[arg-type]  # noqa: E731
    threads = [threading.Thread(target=ask, args=(png(LARGE),)) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        assert begun.acquire(timeout=WAIT_S)
        ask(png(16))
        assert [call.media["image"].size for call in backend.seen] == [3 * 16 * 16], "the large ones still wait"
    finally:
        go_on.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert sum(call.media["image"].size == 3 * LARGE * LARGE for call in backend.seen) == 8


def test_large_media_are_decoded_at_low_priority() -> None:
    pools = Pools()
    try:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        niceness = [
            pool.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(WAIT_S)
            for pool in (pools.media, pools.large)
        ]
        assert niceness == [own, max(own, LARGE_NICENESS)]
    finally:
        pools.close()


@pytest.mark.parametrize(
    ("data", "large"),
    [(png(LARGE), True), (png(1024), False), (b"", False), (b"x" * 1000, False), (bytes((1 << 20) + 1), True)],
)
def test_what_is_large(data: bytes, large: bool) -> None:
    assert is_large(data) == large


SERVE = """
import sys
from tests.kit.fake_backend import FakeBackend
from tests.kit.proxy_server import running_proxy
with running_proxy(FakeBackend()) as proxy:
    print(proxy.root, flush=True)
    sys.stdin.read()
"""


@contextmanager
def own_process() -> Iterator[str]:
    """Root URL of a proxy whose interpreter does nothing else."""
    child = subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        yield child.stdout.readline().strip()
    finally:
        child.stdin.close()
        child.wait(WAIT_S)
        child.stdout.close()


def median_s(client: httpx.Client, root: str, data: bytes, count: int = 30) -> float:
    times = []
    for _ in range(count):
        started = time.monotonic()
        answer = client.post(f"{root}/v1/chat/completions", json={"model": "fake", "messages": asking(data)})
        times.append(time.monotonic() - started)
        assert answer.status_code == 200
    return statistics.median(times)


@pytest.mark.soak
def test_a_small_image_waits_at_most_twice_as_long_beside_large_ones() -> None:
    large, small, over = png(5792, "RGBA"), png(256), threading.Event()
    with own_process() as root, httpx.Client(timeout=120) as client:

        def attack() -> None:
            with httpx.Client(timeout=120) as other:
                while not over.is_set():
                    median_s(other, root, large, 1)

        ratios = []
        for _ in range(3):
            alone = median_s(client, root, small)
            over.clear()
            threads = [threading.Thread(target=attack) for _ in range(4)]
            for thread in threads:
                thread.start()
            ratios.append(median_s(client, root, small) / alone)
            over.set()
            for thread in threads:
                thread.join(120)
    print("beside / alone:", np.round(ratios, 2))
    assert statistics.median(ratios) <= 2.0
