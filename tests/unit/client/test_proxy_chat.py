# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions through the real SDK: shapes, order, errors, and clients that leave."""

from __future__ import annotations

import base64
import http.client
import io
import json
import threading
import wave
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.kit.fake_backend import RATE_HZ, SAMPLES, FakeBackend, sine
from tests.kit.proxy_server import RunningProxy
from triton_omni.backends.core.generate import ImageParams
from triton_omni.backends.core.outputs import Candidate, FunctionCall, TextPiece, TokenLogprob
from triton_omni.openai.endpoints.image_request import as_base64
from triton_omni.openai.http.calls import PieceStream
from triton_omni.openai.media import audio as coding

USER: Any = [{"role": "user", "content": "hello"}]
SPOKEN: Any = {"modalities": ["text", "audio"], "audio": {"voice": "sine", "format": "pcm16"}}
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
WHOLE = coding.to_int16(np.concatenate([sine(i * SAMPLES) for i in range(4)])).tobytes()


def complete(sdk: openai.OpenAI, **more: Any) -> Any:
    return sdk.chat.completions.create(**{"model": "fake", "messages": USER, **more})


def audio_of(chunk: Any) -> dict[str, Any]:
    """`delta.audio`: a field of its own in newer SDKs, an extra in older ones."""
    return chunk.model_dump(exclude_unset=True)["choices"][0]["delta"].get("audio") or {}


def image_at(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def audio(data: str, kind: str) -> dict[str, Any]:
    part = {"type": "input_audio", "input_audio": {"data": data, "format": kind}}
    return {"messages": [{"role": "user", "content": [part]}]}


def test_text_at_once(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    answer = complete(sdk, max_tokens=4)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (
        "w0 w1 w2 w3 ",
        "assistant",
        "length",
    )
    assert choice.message.audio is None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 4, 9)
    assert answer.object == "chat.completion" and answer.model == "fake" and answer.id and answer.created
    assert backend.seen[0].request.modalities == (), "what the pipeline's chat makes by itself"
    assert backend.seen[0].completed


def test_text_streamed_in_openais_order(sdk: openai.OpenAI) -> None:
    chunks = list(complete(sdk, max_tokens=2, stream=True, stream_options={"include_usage": True}))
    assert len({c.id for c in chunks}) == 1
    assert len({c.created for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.content for c in chunks[:-2]] == ["", "w0 ", "w1 "]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-2].choices[0].delta.content is None
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 2
    assert all(c.usage is None for c in chunks[:-1])


def test_no_usage_chunk_unless_asked(sdk: openai.OpenAI) -> None:
    chunks = list(complete(sdk, stream=True))
    assert all(c.choices and c.usage is None for c in chunks)


def test_stream_ends_with_done(proxy: RunningProxy) -> None:
    answer = httpx.post(f"{proxy.root}/v1/chat/completions", json={"model": "fake", "messages": USER, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_speech_streamed_in_openais_order(sdk: openai.OpenAI) -> None:
    chunks = list(complete(sdk, max_tokens=4, stream=True, stream_options={"include_usage": True}, **SPOKEN))
    audios = [audio_of(c) for c in chunks if c.choices]
    assert not audios[0] and not audios[-1]  # role first, finish last
    said = [a for a in audios if a]
    assert set(said[0]) == {"id", "transcript"}
    assert sum("id" in a for a in said) == 1
    assert set(said[-1]) == {"expires_at"} and sum("expires_at" in a for a in said) == 1
    assert "".join(a.get("transcript", "") for a in said) == "w0 w1 w2 w3 "
    data = [a["data"] for a in said if "data" in a]
    assert len(data) >= 4, "speech must stream"
    assert all(len(base64.b64decode(d)) % 6 == 0 for d in data[:-1])
    assert base64.b64decode("".join(data)) == WHOLE
    assert all(not c.choices[0].delta.content for c in chunks if c.choices), "base64 or transcript in content"
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].choices == []


def test_sdks_own_stream_helper_joins_audio(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.reason = "stop"  # the helper raises for "length"
    with sdk.chat.completions.stream(model="fake", messages=USER, max_tokens=4, **SPOKEN) as stream:
        for _ in stream:
            pass
        message: Any = stream.get_final_completion().choices[0].message
    assert message.audio.transcript == "w0 w1 w2 w3 "
    assert base64.b64decode(message.audio.data) == WHOLE
    assert message.audio.id.count("audio_") == 1


def test_speech_at_once_equals_the_stream_byte_for_byte(sdk: openai.OpenAI) -> None:
    message = complete(sdk, max_tokens=4, **SPOKEN).choices[0].message
    assert message.content is None
    assert message.audio.transcript == "w0 w1 w2 w3 " and message.audio.id and message.audio.expires_at
    assert base64.b64decode(message.audio.data) == WHOLE


@pytest.mark.parametrize(
    ("kind", "magic"), [("wav", b"RIFF"), ("mp3", b""), ("flac", b"fLaC"), ("opus", b"OggS"), ("aac", b"\xff\xf1")]
)
def test_speech_in_every_format(sdk: openai.OpenAI, kind: str, magic: bytes) -> None:
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "sine", "format": kind}}
    data = base64.b64decode(complete(sdk, max_tokens=30, **spoken).choices[0].message.audio.data)
    assert data.startswith(magic)
    decoded = _decoded(data)
    assert abs(len(decoded) / RATE_HZ - 30 * SAMPLES / RATE_HZ) < 0.1
    assert 0.4 < np.abs(decoded[2000:-2000]).max() < 0.6


def _decoded(data: bytes) -> np.ndarray:
    import av

    with av.open(io.BytesIO(data)) as container:
        resampler = av.AudioResampler("flt", "mono", RATE_HZ)
        frames = [f for frame in container.decode(audio=0) for f in resampler.resample(frame)]
        return np.concatenate([f.to_ndarray().reshape(-1) for f in [*frames, *resampler.resample(None)]])


def test_pcm_of_another_rate_is_24_khz(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.rate_hz = 16_000
    whole = base64.b64decode(complete(sdk, max_tokens=32, **SPOKEN).choices[0].message.audio.data)
    assert abs(len(whole) / 2 - 32 * SAMPLES * 1.5) <= 16
    chunks = list(complete(sdk, max_tokens=32, stream=True, **SPOKEN))
    audios = [audio_of(c) for c in chunks]
    assert base64.b64decode("".join(a.get("data", "") for a in audios)) == whole


def test_usage_counts_spoken_tokens(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.usage = {"audio_frames": 40.0, "cached_tokens": 2.0}
    usage = complete(sdk, max_tokens=4, **SPOKEN).usage
    assert usage.completion_tokens == 44 and usage.total_tokens == 49
    assert usage.completion_tokens_details.audio_tokens == 40
    assert usage.completion_tokens_details.text_tokens == 4
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_logprobs(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    top = (Candidate(1, "é", -0.1), Candidate(2, "b", -3.0))
    backend.extra = TextPiece(logprobs=(TokenLogprob(1, "é", -0.1, top),))
    content = complete(sdk, max_tokens=2, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert [c.token for c in content] == ["é", "é"]
    assert content[0].bytes == [0xC3, 0xA9] and content[0].logprob == -0.1
    assert [t.token for t in content[0].top_logprobs] == ["é"]
    assert backend.seen[0].request.sampling.logprobs == 1
    streamed = list(complete(sdk, max_tokens=2, logprobs=True, stream=True))
    assert streamed[1].choices[0].logprobs.content[0].token == "é"


def test_every_sampling_option_reaches_the_server(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    complete(
        sdk, max_completion_tokens=7, temperature=0.5, top_p=0.9, seed=11, stop=["x", "y"], frequency_penalty=0.1,
        presence_penalty=-0.2, logit_bias={"5": -100}, user="me", metadata={"a": "b"}, store=False,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        tools=[{"type": "function", "function": {"name": "f"}}],
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "priority": 2, "speed": 2,
                    "language": "en", "stages": {"words": {"x": 1}}, "deadlines": {"total_s": 5}},
    )  # fmt: skip
    request = backend.seen[0].request
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (7, 0.5, 0.9, 11)
    assert (sampling.stop, sampling.frequency_penalty, sampling.presence_penalty) == (("x", "y"), 0.1, -0.2)
    assert (sampling.logit_bias, sampling.json_schema) == ({"5": -100.0}, schema)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.ignore_eos) == (3, 0.1, 1.1, True)
    assert (request.priority, request.speech.language, request.speech.speed, request.stages) == (
        2,
        "en",
        2.0,
        {"words": {"x": 1}},
    )
    assert request.deadlines.total_s == 5.0 and len(request.tools) == 1


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hello"}, "messages", "invalid_type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "unsupported_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0].type",
         "unsupported_value"),
        (image_at("file:///etc/passwd"),
         "messages[0].content[0].image_url.url", "invalid_image_url"),
        (image_at("http://127.0.0.1/x"),
         "messages[0].content[0].image_url.url", "invalid_image_url"),
        (image_at("data:image/png;base64,AAAA"),
         "messages[0].content[0].image_url.url", "invalid_image"),
        (audio("AAAA", "midi"),
         "messages[0].content[0].input_audio.format", "unsupported_value"),
        (audio("*", "wav"),
         "messages[0].content[0].input_audio.data", "invalid_audio"),
        (audio("AAAA", "mp3"),
         "messages[0].content[0].input_audio.data", "invalid_audio"),
        ({"messages": [{"role": "assistant", "audio": {"id": "audio_none"}}]}, "messages[0].audio.id", "audio_expired"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": "warm"}, "temperature", "invalid_type"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"frequency_penalty": 3}, "frequency_penalty", "invalid_value"),
        ({"presence_penalty": -3}, "presence_penalty", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "invalid_type"),
        ({"seed": "x"}, "seed", "invalid_type"),
        ({"n": 17}, "n", "invalid_value"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"stop": 5}, "stop", "invalid_type"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"modalities": ["smell"]}, "modalities[0]", "unsupported_value"),
        ({"modalities": []}, "modalities", "invalid_value"),
        ({"modalities": ["text", "audio"]}, "audio", "missing_required_parameter"),
        ({"modalities": ["audio"], "audio": {"voice": "sine"}}, "audio.format", "missing_required_parameter"),
        ({"modalities": ["audio"], "audio": {"format": "wav"}}, "audio.voice", "missing_required_parameter"),
        ({"modalities": ["audio"], "audio": {"voice": "sine", "format": "midi"}}, "audio.format", "unsupported_value"),
        ({"modalities": ["audio"], "audio": {"voice": "bob", "format": "wav"}}, "audio.voice", "invalid_value"),
        ({"modalities": ["audio"], "audio": {"voice": "sine", "format": "wav"}, "stream": True}, "audio.format",
         "unsupported_value"),
        ({"audio": {"voice": "sine", "format": "wav"}}, "audio", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema",
         "missing_required_parameter"),
        ({"tools": [{"type": "magic"}]}, "tools[0]", "unsupported_value"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing_required_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters",
         "invalid_type"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice", "unsupported_value"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS},
         "tool_choice.function.name", "invalid_value"),
        ({"tool_choice": {"type": "function", "function": {"name": "auto"}},
          "tools": [{"type": "function", "function": {"name": "auto"}}]},
         "tool_choice.function.name", "unsupported_value"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}]},
         "messages[0].tool_calls[0].function.arguments", "missing_required_parameter"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
        ({"extra_body": {"deadlines": {"total_s": -1}}}, "deadlines.total_s", "invalid_value"),
        ({"extra_body": {"stages": {"words": 1}}}, "stages.words", "invalid_type"),
    ],
)  # fmt: skip
def test_bad_input_names_the_parameter(
    sdk: openai.OpenAI, backend: FakeBackend, more: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(sdk, **more)
    error = caught.value
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert error.request_id and str(error.body["message"]) in str(error)  # type: ignore[index]
    assert not any(call.completed for call in backend.seen)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"user": "\\uD800"}'])
def test_a_body_that_is_no_object(proxy: RunningProxy, body: bytes) -> None:
    answer = httpx.post(f"{proxy.root}/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_speech_input_becomes_the_audio_tensor(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(2)
        wav.setsampwidth(2)
        wav.setframerate(48_000)
        wav.writeframes(np.repeat(coding.to_int16(sine(0)), 2).tobytes() * 48)
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}}
    complete(sdk, messages=[{"role": "user", "content": [{"type": "text", "text": "hear"}, part, part]}])
    call = backend.seen[0]
    text, first, second = call.request.messages[0].parts
    assert text.text == "hear" and first.type == second.type == "audio"
    audio = call.media["audio"]
    assert audio.dtype == np.float32
    assert first.sample_rate == 16_000 and abs(first.length - 8_000) < 20
    assert (first.offset, second.offset) == (0, first.length)
    assert len(audio) == first.length + second.length
    assert 0.3 < np.abs(audio).max() <= 1.0


def test_image_input_becomes_the_image_tensor(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    complete(sdk, messages=[{"role": "user", "content": [part]}, {"role": "user", "content": [part]}])
    call = backend.seen[0]
    parts = [m.parts[0] for m in call.request.messages]
    assert [p.shape for p in parts] == [(4, 5, 3)] * 2 and [p.offset for p in parts] == [0, 60]
    assert np.array_equal(call.media["image"][60:].reshape(4, 5, 3), pixels)


@pytest.mark.parametrize(("operations", "seen"), [(["chat"], [255, 255, 255]), (["chat", "edit"], [9, 8, 7])])
def test_hidden_colors_go_to_models_that_edit(
    sdk: openai.OpenAI, backend: FakeBackend, operations: list[str], seen: list[int]
) -> None:
    """As diffusers reads the sources of an edit; every other model sees what people see."""
    backend.operations["fake"] = operations
    file = io.BytesIO()
    Image.new("RGBA", (1, 1), (9, 8, 7, 0)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    complete(sdk, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    assert backend.seen[0].media["image"].tolist() == seen


def test_earlier_audio_stands_for_its_transcript(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    spoken = complete(sdk, max_tokens=2, **SPOKEN).choices[0].message.audio
    history: Any = [*USER, {"role": "assistant", "audio": {"id": spoken.id}}, *USER]
    complete(sdk, messages=history)
    assert backend.seen[1].request.messages[1].content == "w0 w1 "


def test_server_errors_keep_their_meaning(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    cases = [
        ("[too_busy:queue] 9 requests wait", openai.RateLimitError, 429, "rate_limit_exceeded", "retry-after"),
        ("[unavailable:talker] not ready", openai.InternalServerError, 503, "model_not_ready", "retry-after"),
        ("[deadline_exceeded:talker] late", openai.InternalServerError, 504, "deadline_exceeded", "x-should-retry"),
        ("[stage_failed:talker] died", openai.InternalServerError, 500, "stage_failed", "x-should-retry"),
        ("[internal] bug", openai.InternalServerError, 500, "internal_error", "x-should-retry"),
        ("[not_found] gone", openai.NotFoundError, 404, "model_not_found", "x-request-id"),
    ]
    for line, kind, status, code, header in cases:
        backend.refusal = line
        with pytest.raises(kind) as caught:
            complete(sdk)
        assert (caught.value.status_code, caught.value.code) == (status, code)
        assert header in caught.value.response.headers
        with pytest.raises(kind):
            complete(sdk, stream=True)  # before the first piece a stream's error has its status, too


def test_server_fields_become_openai_parameters(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    for where, param in [
        ("sampling.max_tokens", "max_completion_tokens"), ("speech.voice", "audio.voice"), ("sampling.top_p", "top_p"),
        ("sampling.json_schema", "response_format"), ("messages", "messages"), ("modalities", "modalities"),
        ("request", "messages"),
    ]:  # fmt: skip
        backend.refusal = f"[bad_request:{where}] no"
        with pytest.raises(openai.BadRequestError) as caught:
            complete(sdk, max_completion_tokens=3)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 2000}}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": "x" * 2000}}}},
         "response_format"),
        ({"extra_body": {"stages": {"words": {"a": "x" * 2000}}}}, "stages"),
    ],
)  # fmt: skip
def test_of_a_request_that_is_too_large_the_largest_field_is_named(
    sdk: openai.OpenAI, backend: FakeBackend, more: dict[str, Any], param: str
) -> None:
    backend.refusal = "[bad_request:request] the request may have 1000 bytes"
    with pytest.raises(openai.BadRequestError) as caught:
        complete(sdk, **more)
    assert caught.value.param == param


@pytest.mark.parametrize("param", ["size", "negative_prompt", "num_inference_steps"])
def test_options_of_images_for_a_model_that_draws_none(sdk: openai.OpenAI, backend: FakeBackend, param: str) -> None:
    field = {"size": "width", "num_inference_steps": "steps"}.get(param, param)
    backend.refusal = f"[bad_request:image.{field}] pipeline 'fake' does not take 'image.{field}'"
    given = {"size": "16x16", "negative_prompt": "no", "num_inference_steps": 3}[param]
    with pytest.raises(openai.BadRequestError, match="pipeline 'fake' does not take") as caught:
        complete(sdk, extra_body={param: given})
    assert caught.value.param == param


def test_an_unknown_model(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        complete(sdk, model="other")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_failure_in_mid_stream_raises_in_the_sdk(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.fail_after = 2
    said: list[str] = []
    with pytest.raises(openai.APIError, match="talker: out of luck") as caught:
        said += [c.choices[0].delta.content for c in complete(sdk, max_tokens=9, stream=True)]
    assert caught.value.code == "stage_failed"
    backend.fail_after = None
    answer = httpx.post(
        f"{sdk.base_url}chat/completions", json={"model": "fake", "messages": USER, "stream": True, "max_tokens": 1}
    )
    assert answer.text.endswith("[DONE]\n\n"), "the next request is well"


def test_no_done_after_an_error(proxy: RunningProxy, backend: FakeBackend) -> None:
    backend.fail_after = 1
    answer = httpx.post(f"{proxy.root}/v1/chat/completions", json={"model": "fake", "messages": USER, "stream": True})
    last = answer.text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "talker: out of luck"
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("hold_after", [0, 1])
def test_a_client_that_leaves_ends_the_request(
    proxy: RunningProxy, backend: FakeBackend, hold_after: int, is_stream: bool
) -> None:
    backend.hold_after = hold_after
    connection = http.client.HTTPConnection(proxy.root.removeprefix("http://"), timeout=30)
    body = json.dumps({"model": "fake", "messages": USER, "stream": is_stream})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    assert backend.called.acquire(timeout=30)
    assert backend.seen[0].begun.wait(30)
    connection.close()
    assert backend.seen[0].over.wait(30), "the server's request goes on although no client reads"
    assert not backend.seen[0].completed


def test_a_silent_stream_is_kept_alive(
    proxy: RunningProxy, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float | None] = []
    wait = PieceStream.wait

    async def quick(self: PieceStream, timeout_s: float | None = None) -> bool:
        waited.append(timeout_s)
        return await wait(self, None if timeout_s is None else 0.05)

    monkeypatch.setattr(PieceStream, "wait", quick)
    backend.hold_after = 1
    body = {"model": "fake", "messages": USER, "stream": True}
    with httpx.stream("POST", f"{proxy.root}/v1/chat/completions", json=body) as answer:
        seen = ""
        for text in answer.iter_text():
            seen += text
            if seen.count(": ping\n\n") == 2:
                break
    assert seen.index('"w0 "') < seen.index(": ping")
    assert 10.0 in waited
    assert backend.seen[0].over.wait(10)


def test_requests_at_once_do_not_mix(proxy: RunningProxy, sdk: openai.OpenAI) -> None:
    answers: dict[int, str] = {}

    def ask(count: int) -> None:
        chunks = complete(sdk, max_tokens=count, stream=True)
        answers[count] = "".join(c.choices[0].delta.content or "" for c in chunks)

    threads = [threading.Thread(target=ask, args=(count,)) for count in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {n: "".join(f"w{i} " for i in range(n)) for n in range(1, 17)}


def test_a_video_becomes_the_video_tensor(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    url = "data:video/mp4;base64," + base64.b64encode(video(seconds=3)).decode()
    complete(sdk, messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}])
    (part,) = backend.seen[0].request.messages[0].parts
    frames = backend.seen[0].media["video"].reshape(part.shape)
    assert part.shape == (6, 48, 64, 3) and part.fps == 2.0
    brightness = frames.mean((1, 2, 3))
    assert np.all(np.diff(brightness) > 20), "every half second a brighter image"


def test_a_video_includes_its_audio_where_asked(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    url = "data:video/mp4;base64," + base64.b64encode(video(seconds=2, sounding=True)).decode()
    messages = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}]
    complete(sdk, messages=messages, extra_body={"mm_processor_kwargs": {"use_audio_in_video": True}})
    image, audio = backend.seen[0].request.messages[0].parts
    assert (image.type, audio.type, audio.in_video) == ("video", "audio", True)
    assert abs(audio.length - 2 * 16_000) < 2_000 and audio.sample_rate == 16_000
    decoded = backend.seen[0].media["audio"]
    assert len(decoded) == audio.length and 0.2 < np.abs(decoded[4_000:28_000]).max() < 0.3

    silent = "data:video/mp4;base64," + base64.b64encode(video(seconds=1)).decode()
    messages[0]["content"][0]["video_url"]["url"] = silent
    with pytest.raises(openai.BadRequestError, match="no audio track") as caught:
        complete(sdk, messages=messages, extra_body={"mm_processor_kwargs": {"use_audio_in_video": True}})
    assert caught.value.param == "messages[0].content[0].video_url.url"


def video(seconds: int, sounding: bool = False) -> bytes:
    """A video of ten frames a second that grows from black to white, with a hum of 440 Hz if it is `sounding`."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        track: Any = container.add_stream("aac", rate=16_000, layout="mono") if sounding else None
        count = seconds * 10
        for i in range(count):
            pixels = np.full((48, 64, 3), 255 * i // count, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
        if track is not None:
            hum = 0.25 * np.sin(2 * np.pi * 440 * np.arange(seconds * 16_000) / 16_000, dtype=np.float32)
            frame = av.AudioFrame.from_ndarray(hum[None], format="fltp", layout="mono")
            frame.sample_rate = 16_000
            container.mux([*track.encode(frame), *track.encode(None)])
    return file.getvalue()


@pytest.mark.parametrize("kind", ["wav", "mp3"])
def test_the_content_of_audio_decides_not_its_name(sdk: openai.OpenAI, backend: FakeBackend, kind: str) -> None:
    data = coding.encode("flac", RATE_HZ, [sine(0)] * 20)
    complete(sdk, **audio(base64.b64encode(data).decode(), kind))
    assert abs(len(backend.seen[0].media["audio"]) - 20 * SAMPLES * 16_000 / RATE_HZ) < 20


def test_too_many_images_name_the_part(sdk: openai.OpenAI) -> None:
    part = {"type": "image_url", "image_url": {"url": DOT}}
    with pytest.raises(openai.BadRequestError, match="32") as caught:
        complete(sdk, messages=[{"role": "user", "content": [part] * 16}, {"role": "user", "content": [part] * 17}])
    assert caught.value.param == "messages[1].content[16]"


def test_choices_are_runs_of_their_own(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    answer = complete(sdk, n=3, seed=7, max_tokens=2)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [c.message.content for c in answer.choices] == ["w0 w1 "] * 3
    assert [call.request.sampling.seed for call in backend.seen] == [7, 8, 9]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 6)
    assert len({call.request_id for call in backend.seen}) == 1, "one id ends them all"


def test_streamed_choices_take_turns(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    with sdk.chat.completions.stream(
        model="fake", messages=USER, n=2, max_tokens=3, stream_options={"include_usage": True}
    ) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
    words: dict[int, str] = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            words[choice.index] += choice.delta.content or ""
    assert words == {0: "w0 w1 w2 ", 1: "w0 w1 w2 "}
    said = [c.choices[0].index for c in chunks if c.choices and c.choices[0].delta.content]
    assert 1 in said[:3] and 0 in said[-3:]
    assert sum(bool(c.choices and c.choices[0].finish_reason) for c in chunks) == 2
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6


def test_a_choice_that_fails_fails_all_and_none_goes_on(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.fail_after = 1
    with pytest.raises(openai.InternalServerError):
        complete(sdk, n=3)
    assert all(call.over.wait(10) for call in backend.seen)


def test_images_at_once_and_streamed(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    asked: Any = {"modalities": ["image"], "n": 2, "seed": 3, "extra_body": {"size": "32x16", "num_inference_steps": 4}}
    answer = complete(sdk, **asked)
    for choice in answer.choices:
        (image,) = choice.message.images
        assert np.asarray(Image.open(image_of(image["image_url"]["url"]))).shape == (16, 32, 3)
        assert choice.message.content is None and choice.finish_reason
    request = backend.seen[0].request
    assert (request.operation, request.modalities) == ("chat", ("image",))
    assert request.image == ImageParams(width=32, height=16, steps=4)
    with sdk.chat.completions.stream(model="painter", messages=USER, modalities=["image"]) as stream:  # type: ignore[list-item]
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert [p["type"] for p in message.images] == ["image_url"]  # type: ignore[attr-defined]
    complete(sdk, messages=[*USER, answer.choices[0].message.model_dump(), *USER])  # what came may be sent back


def test_a_chat_has_no_previews(sdk: openai.OpenAI) -> None:
    asked: Any = {"modalities": ["image"], "extra_body": {"stages": {"denoiser": {"partial_images": 2}}}}
    assert len(complete(sdk, **asked).choices[0].message.images) == 1
    chunks = complete(sdk, stream=True, **asked)
    assert sum(len((c.choices[0].delta.model_extra or {}).get("images", [])) for c in chunks) == 1


def image_of(url: str) -> io.BytesIO:
    return io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))


DOT = "data:image/png;base64," + as_base64(np.zeros((1, 1, 3), np.uint8))


CALLS = tuple(FunctionCall(f"call_{i}", "f", f'{{"x": {i}}}') for i in range(2))


def test_function_calls_at_once_and_their_answers_sent_back(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.extra, backend.reason = TextPiece(tool_calls=CALLS), "tool_calls"
    choice: Any = {"type": "function", "function": {"name": "f"}}
    answer = complete(sdk, max_tokens=1, tools=TOOLS, tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert [(c.id, c.type, c.function.name) for c in answer.message.tool_calls] == [
        ("call_0", "function", "f"), ("call_1", "function", "f"),
    ]  # fmt: skip
    assert json.loads(answer.message.tool_calls[1].function.arguments) == {"x": 1}
    assert (backend.seen[0].request.tool_choice, backend.seen[0].request.tools) == ("f", tuple(TOOLS))
    result = {"role": "tool", "tool_call_id": "call_0", "content": "42"}
    complete(sdk, messages=[*USER, answer.message, result], tools=TOOLS)
    _, called, result = backend.seen[1].request.messages
    assert called.tool_calls[0]["function"] == {"name": "f", "arguments": '{"x": 0}'}
    assert (result.role, result.tool_call_id, result.content) == ("tool", "call_0", "42")
    alone = complete(sdk, max_tokens=1, tools=TOOLS, parallel_tool_calls=False, tool_choice="required").choices[0]
    assert [c.id for c in alone.message.tool_calls] == ["call_0"]
    assert backend.seen[2].request.tool_choice == "required"
    complete(sdk, tools=TOOLS, tool_choice="none")
    assert backend.seen[3].request.tools == ()


def test_function_calls_streamed_through_the_sdks_helper(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.extra, backend.reason = TextPiece(tool_calls=CALLS), "tool_calls"
    with sdk.chat.completions.stream(model="fake", messages=USER, max_tokens=1, tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        choice = stream.get_final_completion().choices[0]
    assert [event.arguments for event in done] == ['{"x": 0}', '{"x": 1}']
    assert [call.id for call in choice.message.tool_calls or ()] == ["call_0", "call_1"]
    assert choice.finish_reason == "tool_calls"


def test_a_number_out_of_range_is_shown_as_it_was_sent(proxy: RunningProxy) -> None:
    for name, sent, shown in [
        ("temperature", "1234567.25", "from 0 to 2, not 1234567.25."),
        ("seed", str(2**70), f"from {-(2**63)} to {2**63 - 1}, not {2**70}."),
        ("max_tokens", "1e999", "1e999 is not a finite number"),
        ("top_p", "NaN", "NaN is not a finite number"),
    ]:
        body = f'{{"model": "fake", "messages": {json.dumps(USER)}, "{name}": {sent}}}'
        answer = httpx.post(f"{proxy.root}/v1/chat/completions", content=body)
        assert answer.status_code == 400 and shown in answer.json()["error"]["message"]
