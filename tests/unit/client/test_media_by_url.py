# SPDX-License-Identifier: Apache-2.0
"""Media by URL: through the proxy, past its border, and clients that leave while something is fetched."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.kit.fake_backend import RATE_HZ, FakeBackend, sine
from tests.kit.proxy_server import running_proxy
from tests.kit.web_server import web
from triton_omni import Media, MediaError
from triton_omni import fetch as fetching
from triton_omni.openai.endpoints import messages
from triton_omni.openai.http.settings import Settings
from triton_omni.openai.media import audio as coding


def image() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), 77, np.uint8)).save(file, "webp")
    return file.getvalue()


def asking(kind: str, url: str) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": kind, kind: {"url": url}}]}]


def test_images_and_audio_behind_urls_reach_the_server(backend: FakeBackend) -> None:
    pages = {
        "/moved": (302, {"location": "/cat.txt"}, b""),
        "/cat.txt": (200, {"content-type": "text/plain"}, image()),
        "/audio": (200, {"content-type": "image/png"}, coding.encode("opus", RATE_HZ, [sine(0)] * 48)),
    }
    with web(pages) as root, running_proxy(backend, Settings(private_urls=True)) as proxy, proxy.sdk() as sdk:
        sdk.chat.completions.create(model="fake", messages=asking("image_url", f"{root}/moved"))
        sdk.chat.completions.create(model="fake", messages=asking("audio_url", f"{root}/audio"))
    assert backend.seen[0].media["image"].size == 4 * 6 * 3
    assert abs(len(backend.seen[1].media["audio"]) - 16_000) < 1_000


@pytest.mark.parametrize(
    ("kind", "url", "code"),
    [
        ("image_url", "http://localhost/x", "invalid_image_url"),
        ("audio_url", "http://[::1]/x", "invalid_audio_url"),
        ("video_url", "http://169.254.169.254/latest", "invalid_video_url"),
        ("video_url", "ftp://example.com/x", "invalid_video_url"),
        ("video_url", "http://example.com:99999/x", "invalid_video_url"),
        ("audio_url", "data:audio/wav;base64,*", "invalid_audio_url"),
        ("audio_url", "data:audio/wav;base64,AAAA", "invalid_audio"),
        ("video_url", "data:video/mp4;base64,AAAA", "invalid_video"),
    ],
)
def test_what_is_not_read_names_the_url(sdk: openai.OpenAI, kind: str, url: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="fake", messages=asking(kind, url))
    assert (caught.value.param, caught.value.code) == (f"messages[0].content[1].{kind}.url", code)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/never-connected", "data:,undecoded"])
@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_kinds_that_a_model_does_not_take_are_refused_before_they_are_read(
    sdk: openai.OpenAI, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, kind: str, url: str
) -> None:
    backend.media = ("text",)
    touched: list[str] = []
    for name in ("read_url", "from_data_url", "from_base64"):
        monkeypatch.setattr(messages, name, lambda *_, name=name: touched.append(name))
    with pytest.raises(openai.BadRequestError, match=f"The model 'fake' takes text, not {kind}") as caught:
        sdk.chat.completions.create(model="fake", messages=asking(f"{kind}_url", url))
    assert (caught.value.param, caught.value.code) == (f"messages[0].content[1].{kind}_url.url", "unsupported_value")
    assert not touched and not backend.seen


def test_files_that_a_model_does_not_take_are_refused_before_they_are_decoded(
    sdk: openai.OpenAI, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.media = ("text",)
    decoded: list[str] = []
    for name in ("image", "audio", "mask"):
        monkeypatch.setattr(Media, name, lambda *_, name=name, **__: decoded.append(name))
    speech = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    with pytest.raises(openai.BadRequestError, match="takes text, not audio"):
        sdk.chat.completions.create(model="fake", messages=[{"role": "user", "content": [speech]}])
    with pytest.raises(openai.BadRequestError, match="takes text, not audio"):
        sdk.audio.transcriptions.create(model="fake", file=("a.wav", b"RIFF"))
    with pytest.raises(openai.BadRequestError, match="does not edit images"):
        sdk.images.edit(model="painter", image=image(), prompt="a fox")
    assert not decoded and not backend.seen


def test_the_checked_address_is_connected_to_again_at_every_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def resolve(host: str, port: int, **_: object) -> list[Any]:
        asked.append(host)
        address = {"outside.test": "127.0.0.1", "inside.test": "127.0.0.2"}[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    pages: dict[str, tuple[int, dict[str, str], bytes]] = {"/good": (200, {}, b"content")}
    with web(pages) as root:
        port = root.rpartition(":")[2]
        pages["/inward"] = (302, {"location": f"http://inside.test:{port}/good"}, b"")
        only_outside = lambda address: address == "127.0.0.1"  # noqa: E731
        read = lambda path: asyncio.run(fetching.read_url(f"http://outside.test:{port}{path}", only_outside))  # noqa: E731
        assert read("/good") == b"content"
        assert asked == ["outside.test"], "one look-up: a second one might give another address"
        with pytest.raises(MediaError, match="not public"):
            read("/inward")


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "100.64.0.1", "169.254.1.1", "::1", "fd00::1", "fe80::1%lo", "fec0::1", "ff0e::1", "::ffff:10.0.0.1",
     "::7f00:1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "5f00::1"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not fetching.is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses(address: str) -> None:
    assert fetching.is_public(address)


def test_names_in_any_script_and_redirects_to_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: object) -> list[Any]:
        assert host == "xn--bcher-kva.test"
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with web({"/good": (200, {}, b"content"), "/nowhere": (302, {}, b""), "/same": (304, {}, b"")}) as root:
        at = f"http://bücher.test:{root.rpartition(':')[2]}"
        assert asyncio.run(fetching.read_url(f"{at}/good", fetching.is_any)) == b"content"
        for path, status in (("/nowhere", "302"), ("/same", "304")):
            with pytest.raises(MediaError, match=f"status {status}"):
                asyncio.run(fetching.read_url(at + path, fetching.is_any))


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_while_its_image_is_fetched(backend: FakeBackend, is_stream: bool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        running_proxy(backend, Settings(private_urls=True)) as proxy,
    ):
        silent.settimeout(10)
        over = threading.Event()

        def hold() -> None:
            connection, _ = silent.accept()
            connection.settimeout(10)
            with connection:
                while connection.recv(1 << 16):
                    pass
            over.set()

        holder = threading.Thread(target=hold)
        holder.start()
        asked = asking("image_url", f"http://127.0.0.1:{silent.getsockname()[1]}/slow")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{proxy.root}/v1/chat/completions", timeout=httpx.Timeout(10, read=0.5),
                json={"model": "fake", "messages": asked, "stream": is_stream},
            )  # fmt: skip
        assert over.wait(5), "the proxy goes on fetching for no client"  # its own bound is 15 s
        holder.join(10)
    assert not backend.seen


def test_media_of_our_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    media = Media()
    parts = [media.image(image()), media.audio(sine(0), RATE_HZ), media.image(np.zeros((2, 3, 3), np.uint8))]
    assert [(p.type, p.offset, p.length) for p in parts] == [("image", 0, 72), ("audio", 0, 500), ("image", 72, 18)]
    assert {name: tensor.size for name, tensor in media.tensors.items()} == {"image": 90, "audio": 500}
    for wrong in (np.zeros((2, 3, 3)), np.zeros(4, np.uint8)):
        with pytest.raises(MediaError, match="cannot be"):
            media.image(wrong)
    monkeypatch.setattr("triton_omni.media.limits.MAX_BYTES", 2_200)
    with pytest.raises(MediaError, match="together"):
        media.image(np.zeros((10, 10, 3), np.uint8))


def test_audio_in_a_video_is_audio_and_images_are_no_video() -> None:
    media = Media()
    with pytest.raises(MediaError, match="not a supported video"):
        media.video(coding.encode("wav", RATE_HZ, [sine(0)]))
    with pytest.raises(MediaError, match="not a supported video"):
        media.video(image())


def video(frames: int) -> bytes:
    """64 x 48, two a second."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        track = container.add_stream("mpeg4", rate=2)
        track.width, track.height, track.pix_fmt = 64, 48, "yuv420p"
        for _ in range(frames):
            container.mux(track.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8))))
        container.mux(track.encode(None))
    return file.getvalue()


def test_a_video_in_an_unknown_codec() -> None:
    assert Media().video(video(1)).shape == (1, 48, 64, 3)
    with pytest.raises(MediaError, match="codec"):
        Media().video(video(1).replace(b"V_MPEG4", b"V_OTHER"))


@pytest.mark.parametrize(
    ("bound", "most", "says"),
    [
        ("MAX_DECODED_FRAMES", 3, "3 frames"),
        ("MAX_DECODED_PIXELS", 3 * 64 * 48, "9216 pixels together"),
        ("MAX_PIXELS", 64 * 48 - 1, "of 3071 pixels"),
        ("MAX_VIDEO_FRAMES", 3, "1.5 seconds"),
    ],
)
def test_the_bounds_of_a_video(monkeypatch: pytest.MonkeyPatch, bound: str, most: int, says: str) -> None:
    monkeypatch.setattr(f"triton_omni.media.limits.{bound}", most)
    if bound != "MAX_PIXELS":  # of each frame, whatever their number
        assert Media().video(video(3)).shape[0] == 3
    with pytest.raises(MediaError, match=says):
        Media().video(video(4))


def test_audio_whose_title_is_not_utf8() -> None:
    title = b"INFOINAM" + (4).to_bytes(4, "little") + "café".encode("latin-1")
    file = coding.encode("wav", RATE_HZ, [sine(0)]) + b"LIST" + len(title).to_bytes(4, "little") + title
    assert Media().audio(file).length


def test_recordings_are_not_fetched_for_pipelines_without_audio(backend: FakeBackend) -> None:
    backend.media = ("text",)
    body = {"model": "fake", "input": "x", "voice": "sine", "ref_audio": "http://127.0.0.1:9/v.wav"}
    with running_proxy(backend) as proxy:
        error = httpx.post(f"{proxy.root}/v1/audio/speech", json=body).json()["error"]
    assert (error["param"], error["message"]) == ("ref_audio", "The model 'fake' takes text, not audio.")
