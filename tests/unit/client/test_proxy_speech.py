# SPDX-License-Identifier: Apache-2.0
"""/v1/audio/speech through the real SDK."""

from __future__ import annotations

import base64
import io
import json
import struct
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest

from tests.kit.fake_backend import RATE_HZ, SAMPLES, FakeBackend, sine
from tests.kit.proxy_server import RunningProxy
from triton_omni.openai.media import audio as coding

TEXT = "one two three four"
WORDS = len(TEXT.split())
WHOLE = coding.to_int16(np.concatenate([sine(i * SAMPLES) for i in range(WORDS)])).tobytes()


def speak(sdk: openai.OpenAI, **more: Any) -> Any:
    return sdk.audio.speech.create(**{"model": "fake", "input": TEXT, "voice": "sine", **more})


def test_pcm_is_24_khz_16_bit(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    answer = speak(sdk, response_format="pcm", speed=1.5)
    assert answer.content == WHOLE
    request = backend.seen[0].request
    assert (request.operation, request.input, request.speech.voice, request.speech.speed) == (
        "speech",
        TEXT,
        "sine",
        1.5,
    )


def test_wav_has_a_header_of_unknown_length(sdk: openai.OpenAI) -> None:
    data = speak(sdk, response_format="wav").content
    assert data[:4] == b"RIFF" and data[8:16] == b"WAVEfmt "
    assert struct.unpack("<I", data[24:28]) == (RATE_HZ,)
    assert data[36:44] == b"data\xff\xff\xff\xff"
    assert data[44:] == WHOLE


@pytest.mark.parametrize(
    ("kind", "media_type"),
    [("mp3", "audio/mpeg"), ("opus", "audio/ogg"), ("aac", "audio/aac"), ("flac", "audio/flac"), ("wav", "audio/wav")],
)
def test_every_format_can_be_read(sdk: openai.OpenAI, kind: str, media_type: str) -> None:
    text = " ".join(["word"] * 100)
    answer = speak(sdk, input=text, response_format=kind)
    assert answer.response.headers["content-type"] == media_type
    with av.open(io.BytesIO(answer.content)) as container:
        samples = sum(f.samples * RATE_HZ / f.sample_rate for f in container.decode(audio=0))
    assert abs(samples - 100 * SAMPLES) < 0.1 * RATE_HZ


def test_mp3_is_the_default(sdk: openai.OpenAI) -> None:
    assert speak(sdk).response.headers["content-type"] == "audio/mpeg"


def test_speech_comes_while_it_is_made(proxy: RunningProxy, backend: FakeBackend) -> None:
    backend.hold_after = 2
    body = {"model": "fake", "input": TEXT, "voice": "sine", "response_format": "pcm"}
    with httpx.stream("POST", f"{proxy.root}/v1/audio/speech", json=body) as answer:
        got = b""
        for data in answer.iter_bytes():
            got += data
            if len(got) == 2 * 2 * SAMPLES:
                break
    assert got == WHOLE[: len(got)]
    assert backend.seen[0].over.wait(10), "leaving must end the request"


def test_events(proxy: RunningProxy) -> None:
    body = {"model": "fake", "input": TEXT, "voice": "sine", "response_format": "pcm", "stream_format": "sse"}
    answer = httpx.post(f"{proxy.root}/v1/audio/speech", json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [e["type"] for e in events] == ["speech.audio.delta"] * WORDS + ["speech.audio.done"]
    assert b"".join(base64.b64decode(e["audio"]) for e in events[:-1]) == WHOLE
    assert events[-1]["usage"] == {"input_tokens": 5, "output_tokens": WORDS, "total_tokens": 5 + WORDS}


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"input": ""}, "input", "missing_required_parameter"),
        ({"input": "x" * 4097}, "input", "invalid_value"),
        ({"voice": "bob"}, "voice", "invalid_value"),
        ({"voice": None}, "voice", "missing_required_parameter"),
        ({"voice": None, "instructions": "an old man"}, "instructions", "invalid_value"),
        ({"voice": {"id": "bob"}}, "voice", "invalid_value"),
        ({"response_format": "midi"}, "response_format", "unsupported_value"),
        ({"speed": 5}, "speed", "invalid_value"),
        ({"instructions": "sing"}, "instructions", "invalid_value"),
        ({"input": "\U0001f600"}, "input", "invalid_value"),
        ({"extra_body": {"sped": 2}}, "sped", "unknown_parameter"),
    ],
)
def test_bad_input_names_the_parameter(sdk: openai.OpenAI, more: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        speak(sdk, **more)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_pipeline_that_does_not_speak(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.refusal = "[bad_request:operation] unknown operation 'speech'; this pipeline has: image"
    with pytest.raises(openai.BadRequestError) as caught:
        speak(sdk)
    assert caught.value.param == "model"


def test_failure_before_audio_has_its_status(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.fail_after = 0
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        speak(sdk, response_format="pcm")


def test_failure_after_audio_breaks_the_transfer_off(proxy: RunningProxy, backend: FakeBackend) -> None:
    backend.fail_after = 2
    body = {"model": "fake", "input": TEXT, "voice": "sine", "response_format": "pcm"}
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{proxy.root}/v1/audio/speech", json=body)
