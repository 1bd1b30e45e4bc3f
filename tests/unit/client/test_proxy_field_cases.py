# SPDX-License-Identifier: Apache-2.0
"""What clients in the field send: each case was reported of some server, and is accepted here or answered clearly."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.audio import TranscriptionVerbose
from openai.types.audio.transcription_text_done_event import TranscriptionTextDoneEvent

from tests.kit.fake_backend import RATE_HZ, SAMPLES, FakeBackend, sine
from tests.kit.proxy_server import RunningProxy, running_proxy
from tests.kit.request_mutations import PNG
from triton_omni.backends.wire import Event, GenerateRequest, Part, TextPiece
from triton_omni.openai.http.protocol import KEEP_ALIVE_S, Protocol
from triton_omni.openai.http.settings import BodyLimits, Settings
from triton_omni.openai.media import audio as coding
from triton_omni.pieces import Piece

MESSAGES = [{"role": "user", "content": "x"}]
CHAT = {"model": "fake", "messages": MESSAGES}
CLIP = coding.encode("wav", RATE_HZ, [sine(i * SAMPLES) for i in range(48)])
PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[RunningProxy, FakeBackend]]:
    """One proxy for the cases that change nothing in it."""
    backend = FakeBackend()
    with running_proxy(backend, Settings(limits=BodyLimits(body_bytes=1 << 20))) as running:
        yield running, backend


@pytest.fixture
def url(shared: tuple[RunningProxy, FakeBackend]) -> str:
    return shared[0].root


@pytest.fixture
def server(shared: tuple[RunningProxy, FakeBackend]) -> FakeBackend:
    shared[1].seen.clear()
    return shared[1]


def chat(url: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={**CHAT, **more})


def transcribe(url: str, *fields: tuple[str, str]) -> httpx.Response:
    files = [
        ("file", ("a.wav", CLIP)),
        ("model", (None, "fake")),
        *((name, (None, text)) for name, text in fields),
    ]
    return httpx.post(f"{url}/v1/audio/transcriptions", files=files)


# --- connections ---


def test_idle_connections_outlive_those_of_clients_and_gateways() -> None:
    assert KEEP_ALIVE_S >= 75


def test_an_idle_connection_is_kept_for_the_keep_alive_time_not_for_that_of_heads(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Protocol, "head_s", 0.05)
    with running_proxy(backend, keep_alive_s=1) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as idle:
        idle.settimeout(0.5)
        for _ in range(2):  # before the first request, and after it
            with pytest.raises(TimeoutError):
                idle.recv(1)
            idle.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += idle.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200 ")
        idle.settimeout(10)
        while idle.recv(1 << 16):
            pass  # closed after a second


@pytest.mark.parametrize("key", ["", "secret"])
def test_pages_of_a_listed_origin(backend: FakeBackend, key: str) -> None:
    with running_proxy(backend, Settings(cors_origins=(PAGE,), api_key=key)) as proxy:
        url = f"{proxy.root}/v1/chat/completions"
        asks = {"origin": PAGE, "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type,x-stainless-lang"}  # fmt: skip
        preflight = httpx.options(url, headers=asks)
        assert preflight.status_code == 200, "a preflight never carries the key"
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert httpx.options(url, headers={**asks, "origin": "https://evil.example"}).status_code == 400
        headers = {"origin": PAGE, "authorization": f"Bearer {key or 'any'}"}
        for body, status in ((CHAT, 200), ({**CHAT, "stream": True}, 200), ({}, 400)):
            answer = httpx.post(url, json=body, headers=headers)
            assert answer.status_code == status and answer.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        if key:
            refused = httpx.post(url, json=CHAT, headers={"origin": PAGE})
            assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE


# --- compressed bodies ---


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def packed(url: str, content: bytes, encoding: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", content=content, headers={"content-encoding": encoding})


def test_compressed_bodies(url: str, server: FakeBackend) -> None:
    text = json.dumps(CHAT).encode()
    halves = gzip.compress(text[:20]) + gzip.compress(text[20:])
    for content, encoding in [
        (gzip.compress(text), "gzip"), (gzip.compress(text), "X-GZIP"), (halves, "gzip"),
        (zlib.compress(text), "deflate"), (raw_deflate(text), "deflate"), (text, "identity"),
    ]:  # fmt: skip
        assert packed(url, content, encoding).status_code == 200, encoding
    assert len(server.seen) == 6


def test_compressed_bodies_that_cannot_be_read(url: str, server: FakeBackend) -> None:
    text = json.dumps(CHAT).encode()
    for content, encoding, status in [
        (text, "br", 415), (text, "gzip, gzip", 415), (text, "gzip", 400), (gzip.compress(text)[:-9], "gzip", 400),
        (gzip.compress(b" " * (8 << 20)), "gzip", 413),
    ]:  # fmt: skip
        answer = packed(url, content, encoding)
        assert answer.status_code == status
        if status != 413:
            assert answer.json()["error"]["param"] == "Content-Encoding"
    assert not server.seen


# --- chats ---


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None}, {}, {"content": ""}, {"content": []}, {"content": None, "function_call": {"name": "f"}},
        {"content": None, "refusal": "No."}, {"content": None, "tool_calls": None, "audio": None},
        {"content": "x", "reasoning_content": "hm", "reasoning_details": [{"a": 1}], "provider_specific_fields": {},
         "cache_control": {"type": "ephemeral"}, "thinking_blocks": [], "reasoning": "hm"},
    ],
)  # fmt: skip
def test_replayed_assistant_turns(url: str, server: FakeBackend, turn: dict[str, Any]) -> None:
    history = [*MESSAGES, {"role": "assistant", **turn}, *MESSAGES]
    assert chat(url, messages=history).status_code == 200
    assert server.seen[0].request.messages[1].content == (turn.get("content") or "")


def test_long_histories_with_foreign_fields(url: str) -> None:
    turn = {"role": "assistant", "content": "x", "reasoning_content": "hm", "unknown": None}
    assert chat(url, messages=[*MESSAGES, *[turn] * 500]).status_code == 200


def test_functions_that_return_nothing(url: str, server: FakeBackend) -> None:
    call = {"id": "c", "type": None, "index": 0, "function": {"name": "f", "arguments": "{}"}}
    for content in (None, [], ""):
        turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": content}]
        assert chat(url, messages=[*MESSAGES, *turns]).status_code == 200
        assert server.seen[-1].request.messages[2].content == ""


def respond(url: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/responses", json={"model": "fake", "input": "x", **more})


def test_responses_with_replayed_turns(url: str, server: FakeBackend) -> None:
    for content in (None, "", []):
        turns = [*MESSAGES, {"role": "assistant", "content": content}, *MESSAGES]
        assert respond(url, input=turns).status_code == 200
        assert server.seen[-1].request.messages[1].content == ""
    refused = respond(url, input=[{"role": "user", "content": None}]).json()["error"]
    assert (refused["param"], refused["code"]) == ("input[0].content", "missing_required_parameter")


def test_null_is_not_sent_at_every_depth(url: str) -> None:
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    assert respond(url, tools=[{"type": "function", **function}]).status_code == 200
    assert chat(url, tools=[{"type": "function", "function": function}], stream_options=None).status_code == 200
    assert respond(url, text={"format": {"type": "text", "name": None, "schema": None}}).status_code == 200


def test_empty_turns_of_others_are_refused(url: str) -> None:
    for content in (None, []):
        answer = chat(url, messages=[{"role": "user", "content": content}])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content")


def test_harmless_parameters_of_other_servers(url: str) -> None:
    for more in ({"min_tokens": 0}, {"chat_template_kwargs": {}}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert chat(url, **more).status_code == 200
    for more in ({"tools": [], "tool_choice": "auto"}, {"logprobs": False, "top_logprobs": 0}):
        assert chat(url, **more).status_code == 200
    for more in ({"min_tokens": 0}, {"suffix": ""}):
        answer = httpx.post(f"{url}/v1/completions", json={"model": "fake", "prompt": "x", **more})
        assert answer.status_code == 200
    for more, param in [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ]:  # fmt: skip
        error = chat(url, **more).json()["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_value")


def test_whole_floats_are_integers_however_many(url: str, server: FakeBackend) -> None:
    assert chat(url, max_tokens=2.0, seed=3.0, n=1.0, top_k=5.0).status_code == 200
    assert (server.seen[0].request.sampling.max_tokens, server.seen[0].request.sampling.seed) == (2, 3)


class ClosingBackend(FakeBackend):
    """Ends texts with an empty piece, as engines do whose last tokens are no text."""

    def _pieces(self, request: GenerateRequest) -> Iterator[Piece]:
        *pieces, end = super()._pieces(request)
        yield from (*pieces, Piece(Event("text", output="text", index=len(pieces), piece=TextPiece("")), ""), end)


def test_deltas_of_text_are_not_empty() -> None:
    with running_proxy(ClosingBackend()) as proxy:
        lines = chat(proxy.root, stream=True, max_tokens=2).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert texts == ["", "w0 ", "w1 ", None]  # the role comes with an empty text, as OpenAI's does


@pytest.mark.parametrize("where", ["response_format", "tools", "stages"])
def test_json_that_is_nested_too_deep(url: str, where: str) -> None:
    schema = json.loads('{"a":' * 400 + "1" + "}" * 400)
    more: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "stages": {"words": schema},
    }
    answer = chat(url, **{where: more[where]})
    assert answer.status_code == 400 and "deep" in answer.json()["error"]["message"]


# --- forms ---


@pytest.mark.parametrize("spelling", ["true", "True", "TRUE", "1", "yes", "on"])
def test_booleans_of_forms(url: str, spelling: str) -> None:
    answer = transcribe(url, ("stream", spelling))
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert transcribe(url, ("stream", "False")).json()["text"]


@pytest.mark.parametrize(
    "fields",
    [
        [("prompt", "Names: Anna")], [("temperature", "0.7")], [("language", "")], [("prompt", "")],
        [("response_format", "verbose_json"), ("timestamp_granularities", "word")],
        [("response_format", "verbose_json"), ("timestamp_granularities", "word"),
         ("timestamp_granularities", "segment")],
        [("response_format", "verbose_json"), ("timestamp_granularities", '["word", "segment"]')],
        [("response_format", "verbose_json"), ("timestamp_granularities[0]", "word")],
        [("chunking_strategy", "auto")],
        [("chunking_strategy", '{"type":"server_vad","threshold":0.5,"silence_duration_ms":200}')],
        [("chunking_strategy[type]", "server_vad"), ("chunking_strategy[prefix_padding_ms]", "300")],
    ],
)  # fmt: skip
def test_forms_as_clients_write_them(url: str, fields: list[tuple[str, str]]) -> None:
    answer = transcribe(url, *fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (("chunking_strategy", '{"type":"none"}'), "chunking_strategy"),
        (("chunking_strategy", '{"type":"server_vad","threshold":7}'), "chunking_strategy"),
        (("stream", "maybe"), "stream"),
    ],
)
def test_forms_with_errors(url: str, field: tuple[str, str], param: str) -> None:
    answer = transcribe(url, field)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize("order", [1, -1])
def test_a_form_field_as_a_list_and_as_an_object(url: str, order: int) -> None:
    fields = [("timestamp_granularities[a]", "word"), ("timestamp_granularities", "word")]
    answer = transcribe(url, *fields[::order])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "timestamp_granularities", "invalid_type")


def test_a_language_with_its_region(url: str, server: FakeBackend) -> None:
    for sent, read in (("en-US", "en"), ("pt_BR", "pt"), ("en", "en"), ("english", "english")):
        assert transcribe(url, ("language", sent)).status_code == 200
        assert server.seen.pop().request.transcription.language == read


def speak(url: str, path: str = "/v1/audio/speech", **more: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": "fake", "input": "one", "voice": "sine", **more})


@pytest.mark.parametrize(("tag", "language"), [("en-US", "en"), ("en_Latn_US", "en"), ("en-001", "en"), ("", None)])
def test_the_language_of_speech_with_its_region(url: str, server: FakeBackend, tag: str, language: str | None) -> None:
    for answer in (
        speak(url, language=tag),
        speak(url, "/dev/captioned_speech", language=tag),
        chat(url, language=tag),
    ):
        assert answer.status_code == 200
        assert server.seen[-1].request.speech.language == language


def test_what_speech_clients_send_of_options_that_they_do_not_use(url: str) -> None:
    assert speak(url, timestamp_granularities="word").headers["x-word-timestamps"]
    unused = {"lang_code": "", "return_download_link": False, "download_format": None}
    assert speak(url, "/dev/captioned_speech", **unused).status_code == 200
    refused = speak(url, "/dev/captioned_speech", return_download_link=True).json()["error"]
    assert (refused["param"], refused["code"]) == ("return_download_link", "unsupported_value")


@pytest.mark.parametrize("charset", ["undefined", "unicode_escape", "punycode", "utf-16", "none", "iso-8859-1"])
def test_forms_are_utf_8_whatever_codec_they_name(url: str, server: FakeBackend, charset: str) -> None:
    fields = (("model", b"fake"), ("prompt", "\\ud83d é".encode()), ("image[0]", PNG))
    parts = [b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s' % (n.encode(), v) for n, v in fields]
    parts[2] = parts[2].replace(b'"image[0]"', b'"image[0]"; filename="a.png"')
    headers = {"content-type": f"multipart/form-data; charset={charset}; boundary=b"}
    content = b"\r\n".join([*parts, b"--b--\r\n"])
    answer = httpx.post(f"{url}/v1/images/edits", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    prompt = server.seen[-1].request.messages[0].content[-1]
    assert isinstance(prompt, Part) and prompt.text == "\\ud83d é"


def test_files_under_other_names(url: str) -> None:
    answer = httpx.post(f"{url}/v1/audio/transcriptions", data={"model": "fake"}, files={"audio": CLIP})
    assert answer.json()["error"]["message"] == "Unknown parameter: 'audio'; files are: 'file'."


def test_strictly_typed_clients_read_transcripts(url: str) -> None:
    verbose = TranscriptionVerbose.model_validate(
        transcribe(url, ("response_format", "verbose_json")).json(), strict=True
    )
    assert verbose.segments is not None
    assert (verbose.segments[0].seek, verbose.segments[0].tokens, verbose.segments[0].temperature) == (0, [7, 8], 0.0)
    last = transcribe(url, ("stream", "true")).text.strip().splitlines()[-1]
    done = TranscriptionTextDoneEvent.model_validate(json.loads(last.removeprefix("data: ")), strict=True)
    assert done.usage is None, "seconds are no tokens"


# --- other routes ---


def test_random_seeds_of_images(url: str, server: FakeBackend) -> None:
    body = {"model": "painter", "prompt": "a fox", "seed": -1}
    assert httpx.post(f"{url}/v1/images/generations", json=body).status_code == 200
    assert server.seen[0].request.image.seed is None


def test_speech_that_is_to_be_streamed(url: str) -> None:
    body = {"model": "fake", "input": "hello", "voice": "sine", "stream": True}
    assert httpx.post(f"{url}/v1/audio/speech", json=body).content


def test_lists_that_chat_front_ends_ask_for(url: str) -> None:
    assert httpx.get(f"{url}/v1/audio/voices").json() == {"voices": ["sine"], "uploaded_voices": []}
    assert httpx.get(f"{url}/v1/audio/voices?model=fake").json()["voices"] == ["sine"]
    assert httpx.get(f"{url}/v1/audio/voices?model=other").status_code == 404
    models = httpx.get(f"{url}/v1/audio/models").json()
    assert models["models"] == [{"id": "fake"}, {"id": "painter"}] and models["data"][0]["object"] == "model"
    for path in ("/v1/models", "/v1/models/fake", "/v1/audio/voices", "/v1/audio/voices?model=", "/health"):
        path, mark, query = path.partition("?")
        answer = httpx.get(f"{url}{path}/{mark}{query}")
        assert (answer.status_code, answer.json()) == (200, httpx.get(f"{url}{path}").json()), "no redirect either"
    assert httpx.post(f"{url}/v1/chat/completions/", json=CHAT).status_code == 200
    assert packed(url, json.dumps(CHAT).encode(), "").status_code == 200


def test_unsupported_image_formats_name_the_supported_ones(url: str) -> None:
    answer = httpx.post(f"{url}/v1/images/generations", json={"model": "p", "prompt": "x", "output_format": "bmp"})
    assert "'jpeg', 'png', 'webp'." in answer.json()["error"]["message"]


# --- options ---


def test_aliases_of_models_and_voices(backend: FakeBackend) -> None:
    settings = Settings(model_aliases={"tts-1": "fake", "gpt-4o-mini": "fake"}, voice_aliases={"alloy": "sine"})
    with running_proxy(backend, settings) as proxy, proxy.sdk() as sdk:
        assert [m.id for m in sdk.models.list()] == ["fake", "painter", "tts-1", "gpt-4o-mini"]
        assert sdk.audio.speech.create(model="tts-1", voice="alloy", input="hello").content
        audio: Any = {"voice": "alloy", "format": "wav"}
        spoken = sdk.chat.completions.create(
            model="gpt-4o-mini",
            messages=MESSAGES,
            modalities=["text", "audio"],
            audio=audio,  # type: ignore[arg-type]
        )
        assert spoken.choices[0].message.audio
        assert [(c.pipeline, c.request.speech.voice) for c in backend.seen] == [("fake", "sine")] * 2
        assert httpx.get(f"{proxy.root}/v1/audio/voices").json()["voices"] == ["sine", "alloy"]


def test_aliases_beside_a_fixed_list(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(models={"gpt": "fake"}, model_aliases={"whisper-1": "gpt"})) as proxy:
        assert transcribe(proxy.root, ("model", "whisper-1")).status_code == 400  # sent twice
        assert chat(proxy.root, model="whisper-1").json()["model"] == "whisper-1"
        assert backend.seen[0].pipeline == "fake"


def test_lenient_servers_name_what_they_ignored(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(is_lenient=True)) as proxy:
        answer = chat(proxy.root, beams=5, messages=[{**MESSAGES[0], "mood": "good"}], **{"a\nb: c": 1})
        assert answer.status_code == 200
        assert set(answer.headers["x-ignored-parameters"].split(", ")) == {"beams", "messages[0].mood", "a?b: c"}
        assert "x-ignored-parameters" not in chat(proxy.root, user="me").headers
        refused = httpx.post(f"{proxy.root}/v1/images/generations", json={"model": "p", "prompt": "x", "svg": {}})
        assert refused.json()["error"]["param"] == "svg", "known and not supported is not a typo"
        assert chat(proxy.root, temperature="hot").status_code == 400
        assert "x-ignored-parameters" in transcribe(proxy.root, ("beams", "5")).headers


def test_request_ids_of_clients(url: str, server: FakeBackend, sdk: openai.OpenAI) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine:1/a"})
    assert answer.headers["x-request-id"] == "mine:1/a" == server.seen[0].request_id
    assert answer.json()["id"] == "chatcmpl-mine:1/a"
    for bad in ("x" * 257, "a b", "", "é"):
        headers = httpx.Headers({"x-request-id": bad}, encoding="latin-1")
        refused = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Request-Id")
        assert refused.headers["x-request-id"] not in (bad, "")
    assert len(server.seen) == 1
