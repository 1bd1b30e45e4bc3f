# SPDX-License-Identifier: Apache-2.0
"""`triton-omni`: what its commands ask, show and save, and how they fail. The fake stands in for the server."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.kit.fake_backend import RATE_HZ, FakeBackend, sine
from triton_omni import cli
from triton_omni.backends.core.generate import ImageParams
from triton_omni.openai.media import audio as coding
from triton_omni.subtitles import Phrase, srt
from triton_omni.sync import Client

SPOKEN = coding.encode("mp3", RATE_HZ, [sine(0)] * 48)


@pytest.fixture(autouse=True)
def place(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a few files; the commands talk to the fake."""

    def generate(self: Client, pipeline: str, request: Any, *, media: Any) -> Iterator[Any]:
        async def all_of_them() -> list[Any]:
            return [piece async for piece in backend.generate(pipeline, request, media=media)]

        yield from asyncio.run(all_of_them())

    monkeypatch.setattr(Client, "generate", generate)
    monkeypatch.chdir(tmp_path)
    Path("speech.mp3").write_bytes(SPOKEN)
    for name, mode in (("cat.png", "RGB"), ("mask.png", "RGBA")):
        Image.new(mode, (6, 4)).save(name)
    return tmp_path


def test_transcripts(capsys: pytest.CaptureFixture[str], backend: FakeBackend) -> None:
    def said(*options: str) -> str:
        assert cli.main(["transcribe", "speech.mp3", *options]) == 0
        return capsys.readouterr().out

    assert said() == "Hello there. How are you?\n"
    assert said("--format", "srt").startswith("1\n00:00:00,000 --> 00:00:01,250\nHello there.\n\n2\n")
    assert said("--format", "vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello there.\n")
    printed = json.loads(said("--format", "json", "--words"))
    assert printed["text"] == "Hello there. How are you?"
    assert printed["segments"][1]["words"][0] == {"word": "How", "start_s": 1.5, "end_s": 1.75}
    assert backend.seen[0].request.operation == "transcription" and len(backend.seen[0].media["audio"]) > 10_000
    assert [call.request.transcription.word_timestamps for call in backend.seen] == [False] * 3 + [True]


def test_times_of_long_recordings() -> None:
    assert "01:01:01,500 --> 02:00:00,000" in srt([Phrase(3661.5, 7200, "x")])


def test_a_chat_about_files(capsys: pytest.CaptureFixture[str], backend: FakeBackend) -> None:
    asked = ["chat", "What is this?", "--image", "cat.png", "--audio", "speech.mp3", "--image", "cat.png"]
    assert cli.main([*asked, "--speak", "answer.wav", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("w0 w1 ") and Path("answer.wav").stat().st_size > 1000
    (call,) = backend.seen
    assert [part.type for part in call.request.messages[0].parts] == ["image", "image", "audio", "text"]
    assert call.media["image"].size == 2 * 6 * 4 * 3 and call.request.modalities == ("text", "audio")


def test_a_conversation_shows_its_files_once(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\nsecond\n"))
    assert cli.main(["chat", "--image", "cat.png", "--system", "Be brief."]) == 0
    last = backend.seen[1].request.messages
    assert [m.role for m in last] == ["system", "user", "assistant", "user"]
    assert [p.type for p in last[1].parts] == ["image", "text"] and last[3].content == "second"
    assert backend.seen[1].media["image"].size == 72


def test_images(capsys: pytest.CaptureFixture[str], backend: FakeBackend) -> None:
    assert cli.main(["draw", "a fox", "--size", "32x16", "--steps", "3", "--seed", "1", "--out", "fox.png"]) == 0
    assert np.asarray(Image.open("fox.png")).shape == (16, 32, 3)
    assert cli.main(["edit", "cat.png", "a fox", "--mask", "mask.png", "--out", "fox.jpg", "--model", "painter"]) == 0
    assert Image.open("fox.jpg").format == "JPEG"
    assert "fox.jpg: 16x8" in capsys.readouterr().out
    drawn, edited = backend.seen
    assert drawn.request.image == ImageParams(width=32, height=16, steps=3, seed=1)
    assert edited.request.operation == "edit" and edited.pipeline == "painter"
    assert [p.shape for p in edited.request.messages[0].parts] == [(4, 6, 3), (4, 6), ()]


def test_speech(backend: FakeBackend) -> None:
    assert cli.main(["speak", "one two three", "three.wav", "--speed", "2"]) == 0
    assert Path("three.wav").read_bytes()[:4] == b"RIFF" and backend.seen[0].request.speech.speed == 2


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["transcribe", "nothing.mp3"], "nothing.mp3: No such file or directory"),
        (["transcribe", "cat.png"], "not a supported audio file"),
        (["chat", "x", "--image", "speech.mp3"], "not a supported image"),
        (["edit", "cat.png", "x", "--mask", "cat.png", "--model", "painter"], "A mask needs an alpha channel"),
        (["chat", "x", "--image", "ftp://example.com/x"], "Only http, https and data URLs are read."),
        (["chat", "x", "--image", "data:x"], "A data URL must have the form"),
        (["speak", "one", "no/such/place.wav"], "no/such/place.wav: No such file or directory"),
    ],
)
def test_a_failure_is_one_line(capsys: pytest.CaptureFixture[str], asked: list[str], says: str) -> None:
    assert cli.main(asked) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"triton-omni: {says}") and error.count("\n") == 1


def test_the_servers_refusal_is_one_line(capsys: pytest.CaptureFixture[str], backend: FakeBackend) -> None:
    backend.refusal = "[bad_request:voice] unknown voice 'bob'; available: sine"
    assert cli.main(["speak", "x", "--voice", "bob"]) == 1
    assert capsys.readouterr().err == "triton-omni: [bad_request:voice] unknown voice 'bob'; available: sine\n"
    assert not Path("speech.wav").exists()


@pytest.mark.parametrize(
    "asked",
    [
        ["draw", "x", "--size", "big"],
        ["draw", "x", "--out", "fox.xcf"],
        ["draw", "x", "--out", "fox"],
        ["sing"],
        ["transcribe", "x", "--format", "pdf"],
    ],
)
def test_wrong_usage(backend: FakeBackend, asked: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(asked)
    assert left.value.code == 2 and not backend.seen


@pytest.mark.parametrize("command", ["", "chat", "speak", "transcribe", "draw", "edit", "doctor", "top"])
def test_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*command.split(), "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    if command:
        assert "HOST:PORT" in shown and "None" not in shown
    else:
        assert all(name in shown for name in ("serve", "transcribe", "edit", "Exit status"))
