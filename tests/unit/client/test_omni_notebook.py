# SPDX-License-Identifier: Apache-2.0
"""`Omni` in a notebook: what is asked, shown and kept, over a stand-in of the server."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import threading
import wave
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kit.fake_backend import FakeBackend
from tests.kit.request_mutations import PNG, WAV
from triton_omni import OmniError, omni
from triton_omni.backends.core.responses import Progress
from triton_omni.backends.wire import Event, GenerateRequest
from triton_omni.omni import DrawStep, Omni, show_step
from triton_omni.pieces import Piece


class DrawingBackend(FakeBackend):
    """Reports each step before the image, as the diffusion engine does."""

    def _images(self, request: GenerateRequest) -> Iterator[Piece]:
        for done in (1, 2):
            yield Piece(Event("progress", progress=Progress(done, 2)))
        yield from super()._images(request)


class LoopClient:
    """triton_omni.sync.Client, whose connection is a stand-in."""

    backend = FakeBackend()

    def __init__(self, address: str) -> None:
        self.address = address
        self.connection = self.backend
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Any) -> Any:
        return self.submit(work).result(20)

    def is_live(self) -> bool:
        return not self.backend.unreachable

    def is_public(self, name: str) -> bool:
        return name == "fake"

    def __enter__(self) -> LoopClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    monkeypatch.setattr(omni, "Client", LoopClient)
    monkeypatch.setattr(LoopClient, "backend", DrawingBackend(reason="stop"))
    return LoopClient.backend


@pytest.fixture
def notebook(server: FakeBackend) -> Iterator[Omni]:
    with Omni("fake", image_model="painter", address="here:1") as found:
        yield found


def test_a_chat_remembers_what_was_said(notebook: Omni, server: FakeBackend) -> None:
    arrived: list[str] = []
    first = notebook.chat("one", system="Be brief.", max_tokens=2, seed=5, on_text=arrived.append)
    assert (str(first), first.finish_reason, first.usage["completion_tokens"]) == ("w0 w1 ", "stop", 2)
    assert arrived == ["w0 ", "w1 "] and first.speech is None
    notebook.chat("two", system="Be long.")
    roles = [(m.role, m.content) for m in server.seen[1].request.messages]
    assert roles == [("system", "Be brief."), ("user", "one"), ("assistant", "w0 w1 "), ("user", "two")]
    assert server.seen[0].request.sampling.seed == 5


def test_media_go_with_their_prompt_only(notebook: Omni, server: FakeBackend) -> None:
    notebook.chat("what?", images=[PNG], audio=[WAV])
    assert {part.type for part in server.seen[0].request.messages[0].parts} == {"image", "audio", "text"}
    assert set(server.seen[0].media) == {"image", "audio"}
    notebook.chat("and now?")
    assert not server.seen[1].media and server.seen[1].request.messages[0].content == "what?"


def test_a_failure_leaves_the_history(notebook: Omni, server: FakeBackend) -> None:
    notebook.chat("one")
    before = list(notebook.history)
    server.fail_after = 1
    with pytest.raises(OmniError, match="out of luck"):
        notebook.chat("two")
    assert notebook.history == before and all(call.over.is_set() for call in server.seen)
    with pytest.raises(TypeError, match="imagse"):
        notebook.chat("three", imagse=[])


def test_speech_is_a_wav_file_and_a_player(notebook: Omni) -> None:
    for speech in (notebook.speak("one two"), notebook.chat("x", speak=True, voice="sine", max_tokens=2).speech):
        assert speech is not None
        assert speech.samples.shape == (1000,) and speech.seconds == pytest.approx(1000 / 24_000)
        data = base64.b64decode(speech._repr_html_().partition("base64,")[2].partition('"')[0])
        with wave.open(io.BytesIO(data)) as file:
            assert (file.getnframes(), file.getframerate()) == (1000, 24_000)
            pcm = np.frombuffer(file.readframes(1000), "<i2")
        assert np.allclose(pcm / 32767, speech.samples, atol=1e-4)


def test_images_come_with_progress_and_previews(notebook: Omni) -> None:
    steps: list[DrawStep] = []
    image = notebook.draw("a fox", size=(32, 16), steps=6, seed=3, preview_every=2, on_step=steps.append)
    assert image.size == (32, 16) and image.getpixel((0, 0)) == (200, 200, 200)
    assert [(step.done, step.total) for step in steps[:2]] == [(1, 2), (2, 2)]
    previews = [step.preview for step in steps if step.preview is not None]
    assert len(previews) == 2 and previews[0].size == (32, 16)


def test_async_twins(notebook: Omni) -> None:
    async def use() -> None:
        assert str(await notebook.achat("one", max_tokens=1)) == "w0 "
        assert (await notebook.aspeak("one")).seconds > 0
        assert (await notebook.adraw("x", on_step=lambda step: None)).size == (16, 8)

    asyncio.run(use())


def test_cancelling_a_twin_cancels_the_request(notebook: Omni, server: FakeBackend) -> None:
    server.hold_after = 1

    async def leave() -> None:
        task = asyncio.create_task(notebook.achat("one"))
        await asyncio.to_thread(server.called.acquire)
        await asyncio.to_thread(server.seen[0].begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert server.seen[0].over.wait(10) and not notebook.history


def test_an_address_without_a_server_is_refused(server: FakeBackend) -> None:
    server.unreachable = True
    with pytest.raises(OmniError, match="no server answers at here:1"):
        Omni("fake", address="here:1")


def test_a_bar_on_a_terminal_and_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_step(DrawStep(1, 2))
    assert capsys.readouterr().err == "", "no bar in a log file"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show_step(DrawStep(1, 2))
    show_step(DrawStep(2, 2))
    assert capsys.readouterr().err == f"\r[{'#' * 12}{' ' * 12}] 1/2\r[{'#' * 24}] 2/2\n"
    shown: list[Any] = []
    display = ModuleType("IPython.display")
    display.__dict__.update(HTML=str, clear_output=lambda wait: None, display=shown.append)
    ipython = ModuleType("IPython")
    ipython.__dict__.update(get_ipython=lambda: SimpleNamespace(kernel=object()), display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    show_step(DrawStep(1, 2, preview="pixels"))  # type: ignore[arg-type]
    assert shown == ['<progress max="2" value="1"></progress>', "pixels"]
