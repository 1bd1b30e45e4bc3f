# SPDX-License-Identifier: Apache-2.0
"""wss /v1/audio/speech/stream: what comes while text goes in, what is refused, and what a client that leaves ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.kit.fake_backend import RATE_HZ, SAMPLES, FakeBackend, sine
from tests.kit.proxy_server import RunningProxy, running_proxy
from triton_omni.openai.endpoints import speech_stream
from triton_omni.openai.http.settings import Settings
from triton_omni.openai.media.audio import to_int16

WAIT_S = 20
CONFIG = {"type": "session.config", "model": "fake", "voice": "sine"}


@pytest.fixture
def socket(proxy: RunningProxy) -> Iterator[ClientConnection]:
    with connect(url(proxy)) as opened:
        yield opened


def url(proxy: RunningProxy) -> str:
    return f"ws://127.0.0.1:{proxy.port}/v1/audio/speech/stream"


def say(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def begin(socket: ClientConnection, **more: Any) -> None:
    socket.send(json.dumps({**CONFIG, **more}))
    assert hear(socket)["type"] == "session.created"


def hear(socket: ClientConnection) -> Any:
    message = socket.recv(WAIT_S)
    return message if isinstance(message, bytes) else json.loads(message)


def rest(socket: ClientConnection) -> list[Any]:
    """All that comes until the server closes."""
    got: list[Any] = []
    try:
        while True:
            got.append(hear(socket))
    except ConnectionClosed:
        return got


def pcm(words: int) -> bytes:
    return b"".join(to_int16(sine(i * SAMPLES)).tobytes() for i in range(words))


def test_words_are_spoken_as_soon_as_they_are_complete(socket: ClientConnection) -> None:
    begin(socket)
    say(socket, "input.text", text="One tw")
    start, first = hear(socket), hear(socket)
    assert start == {"type": "audio.start", "format": "pcm", "sample_rate": RATE_HZ}
    assert first == pcm(1), "the first word is audible while the second is not complete"
    say(socket, "input.text", text="o three")
    assert hear(socket) == pcm(2)[len(first) :]
    say(socket, "input.done")
    *audio, done, last = rest(socket)
    assert b"".join([first, pcm(2)[len(first) :], *audio]) == pcm(3)
    assert done["type"] == "audio.done" and last == {"type": "session.done"}
    assert socket.close_code == 1000


def test_times_of_words_come_in_front_of_their_audio(socket: ClientConnection) -> None:
    begin(socket, word_timestamps=True)
    say(socket, "input.text", text="One two")
    say(socket, "input.done")
    got = rest(socket)
    kinds = [m["type"] if isinstance(m, dict) else "audio" for m in got]
    assert kinds == ["audio.words", "audio.start", "audio", "audio.words", "audio", "audio.done", "session.done"]
    assert [w["word"] for w in got[-2]["words"]] == ["One", "two"]


def test_a_format_with_a_head(socket: ClientConnection) -> None:
    begin(socket, response_format="wav")
    say(socket, "input.text", text="One two")
    say(socket, "input.done")
    data = b"".join(m for m in rest(socket) if isinstance(m, bytes))
    assert data[:4] == b"RIFF" and np.frombuffer(data[-4 * SAMPLES :], "<i2").tobytes() == pcm(2)


def test_text_without_anything_to_say_is_a_session_without_audio(socket: ClientConnection) -> None:
    begin(socket)
    say(socket, "input.done")
    assert [m["type"] for m in rest(socket)] == ["audio.start", "audio.done", "session.done"]


def test_parts_that_arrive_together_are_added_together(socket: ClientConnection, backend: FakeBackend) -> None:
    begin(socket)
    for part in "many small parts of a text":
        say(socket, "input.text", text=part)
    say(socket, "input.done")
    assert b"".join(m for m in rest(socket) if isinstance(m, bytes)) == pcm(6)
    assert "".join(backend.appended) == "many small parts of a text"


def test_a_listener_who_leaves_ends_the_request(socket: ClientConnection, backend: FakeBackend) -> None:
    begin(socket)
    say(socket, "input.text", text="One two ")
    assert hear(socket)["type"] == "audio.start"
    socket.close()
    assert backend.seen[0].over.wait(WAIT_S) and not backend.seen[0].completed
    assert not backend.feeds


@pytest.mark.parametrize(
    ("first", "param"),
    [
        ({"type": "input.text", "text": "x"}, "type"),
        ({**CONFIG, "voice": "bob"}, "voice"),
        ({**CONFIG, "model": "nope"}, "model"),
        ({**CONFIG, "response_format": "midi"}, "response_format"),
        ({**CONFIG, "sped": 2}, "sped"),
        ({**CONFIG, "speed": 9}, "speed"),
        ({"type": "session.config", "voice": "sine"}, "model"),
        ([], None),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(
    socket: ClientConnection, first: Any, param: str | None
) -> None:
    socket.send(json.dumps(first))
    (last,) = rest(socket)
    assert last["type"] == "error" and last["error"]["param"] == param
    assert socket.close_code == 1008


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"type": "input.txt", "text": "x"}, "type"),
        ({"type": "input.text"}, "text"),
        ({"type": "input.text", "text": 5}, "text"),
        ({"type": "input.text", "text": "x" * (speech_stream.MAX_TEXT_CHARS + 1)}, "text"),
        ({"type": "input.done", "text": "x"}, "text"),
        (CONFIG, "type"),
        (b"\x00\x01", "type"),
        ("{", None),
    ],
)
def test_a_message_that_cannot_be_taken_ends_the_session_and_its_request(
    socket: ClientConnection, backend: FakeBackend, message: Any, param: str | None
) -> None:
    begin(socket)
    socket.send(message if isinstance(message, bytes | str) else json.dumps(message))
    *_, last = rest(socket)
    assert last["type"] == "error" and last["error"]["param"] == param
    assert socket.close_code == 1008
    assert backend.seen[0].over.wait(WAIT_S) and not backend.seen[0].completed


def test_text_after_the_end_is_refused_or_too_late(socket: ClientConnection) -> None:
    begin(socket)
    socket.send(json.dumps({"type": "input.done"}))
    socket.send(json.dumps({"type": "input.text", "text": "x"}))
    kinds = [m["type"] for m in rest(socket)]
    assert kinds[-1] in ("error", "session.done"), "the end may have come first"


def test_a_stage_that_fails_is_one_error(socket: ClientConnection, backend: FakeBackend) -> None:
    backend.fail_after = 1
    begin(socket)
    say(socket, "input.text", text="One two three ")
    got = rest(socket)
    assert [m["type"] for m in got if isinstance(m, dict)] == ["audio.start", "error"]
    assert "out of luck" in got[-1]["error"]["message"] and socket.close_code == 1011


def test_a_model_that_speaks_only_complete_texts_is_refused_by_name(
    socket: ClientConnection, backend: FakeBackend
) -> None:
    backend.refusal = "[bad_request:open_input] the input of operation 'speech' comes whole"
    socket.send(json.dumps(CONFIG))
    *_, last = rest(socket)
    assert last["type"] == "error" and last["error"]["param"] == "model"


def test_a_client_that_says_nothing_is_ended(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_stream, "CONFIG_S", 0.05)
    with running_proxy(backend) as proxy, connect(url(proxy)) as quiet:
        (error,) = rest(quiet)
    assert error["error"]["code"] == "no_config"


def test_a_key_is_needed_and_counts_its_sessions(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(api_key="secret")) as proxy:
        with pytest.raises(InvalidStatus) as caught:
            connect(url(proxy))
        assert caught.value.response.status_code == 401
        protocols = ["speech", "openai-insecure-api-key.secret"]
        with connect(url(proxy), subprotocols=protocols) as socket:  # type: ignore[arg-type]
            assert socket.subprotocol == "speech"
            begin(socket)


def test_the_clients_request_id_is_the_sessions(proxy: RunningProxy, backend: FakeBackend) -> None:
    with connect(url(proxy), additional_headers={"X-Request-Id": "mine"}) as socket:
        socket.send(json.dumps(CONFIG))
        assert hear(socket) == {"type": "session.created", "id": "mine"}
    assert backend.seen[0].request_id is not None and backend.seen[0].request_id.startswith("mine")
    with pytest.raises(InvalidStatus) as refused, connect(url(proxy), additional_headers={"X-Request-Id": "x" * 257}):
        pass
    assert refused.value.response.status_code == 400


def test_lenient_servers_name_what_a_session_ignored(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(is_lenient=True)) as lenient, connect(url(lenient)) as socket:
        socket.send(json.dumps({**CONFIG, "beams": 5}))
        assert hear(socket)["ignored_parameters"] == ["beams"]
