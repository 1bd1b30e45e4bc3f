# SPDX-License-Identifier: Apache-2.0
"""/v1/audio/transcriptions and /v1/audio/translations through the real SDK."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.kit.fake_backend import RATE_HZ, SAMPLES, FakeBackend, sine
from tests.kit.proxy_server import RunningProxy
from triton_omni.openai.media import audio as coding

CLIP = coding.encode("mp3", RATE_HZ, [sine(i * SAMPLES) for i in range(48)])


def transcribe(sdk: openai.OpenAI, **more: Any) -> Any:
    return sdk.audio.transcriptions.create(**{"model": "fake", "file": ("speech.bin", CLIP), **more})


def test_json_and_what_the_server_gets(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    answer = transcribe(sdk, language="en", temperature=0)
    assert answer.text == "Hello there. How are you?"
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 3)
    call = backend.seen[0]
    assert (call.request.operation, call.request.transcription.language) == ("transcription", "en")
    (part,) = call.request.messages[0].parts
    assert part.type == "audio" and part.length == len(call.media["audio"])
    assert abs(part.length / part.sample_rate - 1.0) < 0.1


def test_other_forms(sdk: openai.OpenAI) -> None:
    assert transcribe(sdk, response_format="text") == "Hello there. How are you?\n"
    verbose = transcribe(sdk, response_format="verbose_json", timestamp_granularities=["segment"])
    assert (verbose.language, verbose.duration, verbose.text) == ("english", 2.75, "Hello there. How are you?")
    assert [(s.id, s.start, s.end) for s in verbose.segments] == [(0, 0.0, 1.25), (1, 1.5, 2.75)]
    keys = ("seek", "tokens", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
    assert [tuple(getattr(s, key) for key in keys) for s in verbose.segments] == [
        (0, [7, 8], 0.0, -0.25, 0.75, 0.125), (50, [7, 9], 0.0, -0.25, 0.75, 0.125),
    ]  # fmt: skip
    assert transcribe(sdk, response_format="srt") == (
        "1\n00:00:00,000 --> 00:00:01,250\nHello there.\n\n2\n00:00:01,500 --> 00:00:02,750\nHow are you?\n"
    )
    assert transcribe(sdk, response_format="vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello there.\n")


def test_words_and_their_times(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    verbose = transcribe(sdk, response_format="verbose_json", timestamp_granularities=["word"])
    assert verbose.segments is None
    assert [(w.word, w.start, w.end) for w in verbose.words[:3]] == [
        ("Hello", 0.0, 0.25), ("there.", 0.25, 0.5), ("How", 1.5, 1.75),
    ]  # fmt: skip
    both = transcribe(sdk, response_format="verbose_json", timestamp_granularities=["word", "segment"])
    assert len(both.words) == 5 and len(both.segments) == 2
    assert transcribe(sdk, response_format="verbose_json").words is None
    assert [call.request.transcription.word_timestamps for call in backend.seen] == [True, True, False]


def test_a_pipeline_that_knows_no_times_of_words(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.refusal = (
        "[bad_request:transcription.word_timestamps] pipeline 'fake' does not take 'transcription.word_timestamps'"
    )
    with pytest.raises(openai.BadRequestError, match="the times of single words") as caught:
        transcribe(sdk, response_format="verbose_json", timestamp_granularities=["word"])
    assert caught.value.param == "timestamp_granularities[]"


def test_streamed(sdk: openai.OpenAI) -> None:
    events = list(transcribe(sdk, stream=True))
    assert [e.type for e in events] == ["transcript.text.delta", "transcript.text.delta", "transcript.text.done"]
    assert "".join(e.delta for e in events[:-1]) == events[-1].text == "Hello there. How are you?"
    assert events[-1].usage is None, "OpenAI's type counts tokens here, not seconds"


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"file": ("speech.wav", b"no audio")}, "file", "invalid_audio"),
        ({"file": ("list.m3u8", b"#EXTM3U\n#EXTINF:10,\nfile:///etc/hostname\n")}, "file", "invalid_audio"),
        ({"response_format": "diarized_json"}, "response_format", "unsupported_value"),
        ({"response_format": "srt", "stream": True}, "response_format", "unsupported_value"),
        ({"response_format": "verbose_json", "timestamp_granularities": ["letter"]}, "timestamp_granularities[]",
         "unsupported_value"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities[]", "invalid_value"),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities[]", "invalid_value"),
        ({"temperature": 2}, "temperature", "invalid_value"),
        ({"extra_body": {"beams": 5}}, "beams", "unknown_parameter"),
    ],
)  # fmt: skip
def test_bad_input_names_the_parameter(sdk: openai.OpenAI, more: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        transcribe(sdk, **more)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_body_that_is_no_form_and_one_without_a_file(proxy: RunningProxy) -> None:
    url = f"{proxy.root}/v1/audio/transcriptions"
    assert httpx.post(url, json={"model": "fake"}).json()["error"]["code"] == "invalid_form"
    answer = httpx.post(url, files={"model": (None, "fake")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")


def test_a_pipeline_that_cannot_hear(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.refusal = "[bad_request:operation] unknown operation 'transcription'; this pipeline has: image"
    with pytest.raises(openai.BadRequestError, match="this pipeline has") as caught:
        transcribe(sdk)
    assert caught.value.param == "model"


def test_nothing_translates(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="transcriptions") as caught:
        sdk.audio.translations.create(model="fake", file=("speech.mp3", CLIP))
    assert caught.value.code == "unsupported_value"
