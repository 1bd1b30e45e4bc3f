# SPDX-License-Identifier: Apache-2.0
"""Times of spoken words in each form of /v1/audio/speech, and as clients of Kokoro-FastAPI expect them."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from tests.kit.fake_backend import RATE_HZ, SAMPLES, FakeBackend
from tests.kit.proxy_server import RunningProxy

TEXT = "Three small words"
TIMES = [{"word": w, "start": i * SAMPLES / RATE_HZ, "end": (i * SAMPLES + SAMPLES // 2) / RATE_HZ}
         for i, w in enumerate(TEXT.split())]  # fmt: skip


def ask(proxy: RunningProxy, path: str = "/v1/audio/speech", **more: Any) -> httpx.Response:
    body = {"model": "fake", "input": TEXT, "voice": "sine", "response_format": "pcm", **more}
    return httpx.post(f"{proxy.root}{path}", json=body)


def events(answer: httpx.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("asked", [{"timestamp_granularities": ["word"]}, {"word_timestamps": True}])
def test_events_bring_words_in_front_of_their_audio(proxy: RunningProxy, asked: dict[str, Any]) -> None:
    got = events(ask(proxy, stream_format="sse", **asked))
    assert [e["type"] for e in got] == ["speech.audio.words", "speech.audio.delta"] * 3 + ["speech.audio.done"]
    assert [word for e in got[:-1] for word in e.get("words", ())] == TIMES
    assert got[-1]["words"] == TIMES


def test_without_being_asked_nothing_has_words(proxy: RunningProxy, backend: FakeBackend) -> None:
    for more in ({}, {"timestamp_granularities": []}, {"word_timestamps": False}):
        got = events(ask(proxy, stream_format="sse", **more))
        assert {e["type"] for e in got} == {"speech.audio.delta", "speech.audio.done"} and "words" not in got[-1]
    assert "x-word-timestamps" not in ask(proxy).headers
    assert all(call.request.modalities == () for call in backend.seen)


def test_a_file_has_them_in_its_head(proxy: RunningProxy) -> None:
    answer, plain = ask(proxy, word_timestamps=True), ask(proxy)
    assert answer.content == plain.content
    assert json.loads(answer.headers["x-word-timestamps"]) == [
        {"word": w["word"], "start_ms": round(w["start"] * 1000), "end_ms": round(w["end"] * 1000)} for w in TIMES
    ]


def test_words_that_no_head_can_hold_are_left_out_and_said_so(proxy: RunningProxy) -> None:
    answer = ask(proxy, word_timestamps=True, input="word " * 200)
    assert answer.status_code == 200 and "x-word-timestamps" not in answer.headers
    assert int(answer.headers["x-word-timestamps-omitted"].split()[0]) > 4096


def test_words_that_could_not_be_found_are_null_and_the_audio_is_whole(
    proxy: RunningProxy, backend: FakeBackend
) -> None:
    backend.missing = {"words": "[stage_failed:aligner] out of luck"}
    answer = ask(proxy, word_timestamps=True)
    assert answer.headers["x-word-timestamps"] == "null" and len(answer.content) == 3 * 2 * SAMPLES
    assert events(ask(proxy, stream_format="sse", word_timestamps=True))[-1]["words"] is None
    whole = ask(proxy, "/dev/captioned_speech", stream=False).json()
    assert whole["timestamps"] is None and len(base64.b64decode(whole["audio"])) == 3 * 2 * SAMPLES


def test_captioned_speech_comes_in_lines_or_as_one(proxy: RunningProxy, backend: FakeBackend) -> None:
    known = [{"word": w["word"], "start_time": w["start"], "end_time": w["end"]} for w in TIMES]
    lines = [json.loads(line) for line in ask(proxy, "/dev/captioned_speech").text.splitlines()]
    assert [line["timestamps"] for line in lines] == [[word] for word in known]
    assert {line["audio_format"] for line in lines} == {"audio/pcm"}
    whole = ask(proxy, "/dev/captioned_speech", stream=False).json()
    assert whole["timestamps"] == known
    assert base64.b64decode(whole["audio"]) == b"".join(base64.b64decode(line["audio"]) for line in lines)
    untimed = ask(proxy, "/dev/captioned_speech", stream=False, return_timestamps=False).json()
    assert untimed["timestamps"] is None and backend.seen[-1].request.modalities == ()


def test_captioned_speech_that_breaks_off_says_so(proxy: RunningProxy, backend: FakeBackend) -> None:
    backend.fail_after = 2
    lines = [json.loads(line) for line in ask(proxy, "/dev/captioned_speech").text.splitlines()]
    assert len(lines) == 2 and "out of luck" in lines[-1]["error"]["message"]


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/audio/speech", {"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ("/v1/audio/speech", {"word_timestamps": True}, "word_timestamps"),
        ("/dev/captioned_speech", {}, "return_timestamps"),
    ],
)
def test_a_pipeline_without_word_times_is_refused_by_the_parameter(
    proxy: RunningProxy, backend: FakeBackend, path: str, more: dict[str, Any], param: str
) -> None:
    backend.refusal = "[bad_request:modalities] unknown modality 'words'; operation 'speech' makes: audio"
    answer = ask(proxy, path, **more)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/audio/speech", {"timestamp_granularities": ["segment"]}, "timestamp_granularities[0]"),
        ("/v1/audio/speech", {"timestamp_granularities": ["word", "word"]}, "timestamp_granularities"),
        ("/v1/audio/speech", {"word_timestamps": "yes"}, "word_timestamps"),
        ("/dev/captioned_speech", {"input": " "}, "input"),
        ("/dev/captioned_speech", {"volume_multiplier": 2}, "volume_multiplier"),
    ],
)
def test_bad_input_names_the_parameter(proxy: RunningProxy, path: str, more: dict[str, Any], param: str) -> None:
    answer = ask(proxy, path, **more)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_captioned_speech_needs_the_key_like_any_other_route() -> None:
    from tests.kit.proxy_server import running_proxy
    from triton_omni.openai.http.settings import Settings

    with running_proxy(FakeBackend(), Settings(api_key="secret")) as proxy:
        assert ask(proxy, "/dev/captioned_speech").status_code == 401
