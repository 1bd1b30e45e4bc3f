# SPDX-License-Identifier: Apache-2.0
"""Pipeline `chat`: what is refused before a stage works, which stages a request opens, what crosses its edges."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.expect import accepts
from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, Part, SpeechParams, TranscriptionParams
from triton_omni.backends.core.outputs import TextPiece, TranscriptPiece
from triton_omni.backends.orchestrator.check import check_request
from triton_omni.backends.pipelines.chat.adapters import text_of, transcript_of
from triton_omni.backends.pipelines.chat.pipeline import PIPELINE

HELLO = (Message("user", "Hello"),)
AUDIO = Part("audio", length=1, sample_rate=16_000)


def test_audio_longer_than_the_deployed_limit_is_refused_before_any_stage_works() -> None:
    """Of all parts together, each at its own rate."""
    parts = (Part("audio", length=16_000, sample_rate=16_000), Part("audio", 16_000, length=80_000, sample_rate=8_000))
    request = GenerateRequest(operation="transcription", messages=(Message("user", parts),))
    accepts(check_request, PIPELINE, request, {"audio": 96_000}, {"transcriber": {"max_audio_s": 11}})
    accepts(check_request, PIPELINE, request, {"audio": 96_000})
    with pytest.raises(BadRequest, match=r"audio must be at most 10 s \(got 11.0\)") as refused:
        check_request(PIPELINE, request, {"audio": 96_000}, {"transcriber": {"max_audio_s": 10}})
    assert refused.value.where == "audio"


def asking(**fields) -> GenerateRequest:
    return GenerateRequest(**({"messages": HELLO} | fields))


def transcribing(**fields) -> GenerateRequest:
    return GenerateRequest(operation="transcription", messages=(Message("user", (AUDIO,)),), **fields)


def speaking(text: str, **fields) -> GenerateRequest:
    return GenerateRequest(operation="speech", input=text, **fields)


@pytest.mark.parametrize(
    "request_",
    [
        asking(),
        asking(speech=SpeechParams(voice="heart", language="en")),
        asking(speech=SpeechParams(language="EN-US"), modalities=("text", "audio")),
        asking(messages=(Message("system", "Be brief."), Message("user", (Part("text", "What is this?"), AUDIO)))),
        asking(messages=(Message("system", "Be brief."),)),
        asking(stages={"thinker": {"temperature": 0.5}, "code2wav": {"chunk_frames": 50}, "talker": {}}),
        asking(speech=SpeechParams(language="")),
        transcribing(transcription=TranscriptionParams(language="")),
        transcribing(transcription=TranscriptionParams(language="en-US")),
        speaking("Hello."),
        speaking("x" * 4096),
        speaking("An ordinary sentence of common words. " * 107, speech=SpeechParams(speed=0.25)),
        speaking("Привет. Hello."),
    ],
)
def test_what_the_pipeline_can_do_is_accepted(request_: GenerateRequest) -> None:
    accepts(PIPELINE.check, request_)


@pytest.mark.parametrize(
    ("request_", "field", "says"),
    [
        (speaking("9" * 4096, speech=SpeechParams(speed=0.25)), "input", "3600 s"),
        (speaking("W" * 4096, speech=SpeechParams(speed=0.25)), "input", "3600 s"),
        (speaking("Привет, мир!"), "input", "English"),
        (speaking("你好，世界。"), "input", "English"),
        (speaking("🎉🎉"), "input", "English"),
        (asking(speech=SpeechParams(voice="alloy")), "speech.voice", "heart"),
        (asking(speech=SpeechParams(voice="")), "speech.voice", "heart"),
        (asking(speech=SpeechParams(language="de")), "speech.language", "en"),
        (asking(messages=()), "messages", "message"),
        (asking(messages=(Message("user", (Part("image", shape=(1, 1, 3)),)),)), "messages[0]", "text and audio"),
        (asking(messages=(Message("user", (Part("video", shape=(1, 1, 3)),)),)), "messages[0]", "text and audio"),
        (asking(messages=(*HELLO, Message("assistant", (AUDIO,)))), "messages[1]", "user"),
        (asking(input="Hello"), "input", "messages"),
        (asking(tools=({"type": "function"},)), "tools", "tools"),
        (asking(stages={"thinkr": {}}), "stages.thinkr", "thinker"),
        (asking(stages={"thinker": {"temprature": 1}}), "stages.thinker.temprature", "temprature"),
        (asking(stages={"thinker": {"temperature": 3}}), "stages.thinker.temperature", "2"),
        (asking(stages={"talker": {"pitch": 1}}), "stages.talker.pitch", "pitch"),
        (asking(stages={"transcriber": {"beams": 5}}), "stages.transcriber.beams", "beams"),
        (asking(stages={"code2wav": {"chunk_frames": 0}}), "stages.code2wav.chunk_frames", "1"),
        (speaking(""), "input", "nothing"),
        (speaking(" \n"), "input", "nothing"),
        (speaking("x" * 4097), "input", "4096"),
        (speaking("Hello.", messages=HELLO), "messages", "input"),
        (speaking("Hello.", speech=SpeechParams(voice="nova")), "speech.voice", "heart"),
    ],
)
def test_anything_else_is_refused_by_field(request_: GenerateRequest, field: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as refused:
        PIPELINE.check(request_)
    assert refused.value.where == field


def test_only_the_stages_a_request_needs_are_opened() -> None:
    spoken = asking(messages=(Message("user", (AUDIO,)),))
    assert PIPELINE.plan(asking()).needed == {"thinker"}
    assert PIPELINE.plan(spoken).needed == {"transcriber", "thinker"}
    assert PIPELINE.plan(asking(modalities=("text", "audio"))).needed == {"thinker", "talker", "code2wav"}
    assert PIPELINE.plan(asking(modalities=("audio",))).needed == {"thinker", "talker", "code2wav"}
    assert PIPELINE.plan(speaking("Hello.")).needed == {"talker", "code2wav"}
    with pytest.raises(BadRequest, match="modality 'text'"):
        PIPELINE.plan(speaking("Hello.", modalities=("text",)))


def test_empty_chunks_and_empty_texts_are_distinguished() -> None:
    empty = Chunk(b"r", "thinker", last=True)
    assert text_of(empty) == "" and transcript_of(empty) is None
    assert text_of(Chunk(b"r", "thinker", piece=TextPiece(" Hi"))) == " Hi"
    assert transcript_of(Chunk(b"r", "transcriber", piece=TranscriptPiece())) == TranscriptPiece()
    with pytest.raises(TypeError):
        text_of(Chunk(b"r", "thinker", piece=TranscriptPiece()))


def test_the_graph_is_light_enough_for_the_triton_stub() -> None:
    heavy = {"torch", "scipy", "onnxruntime", "transformers", "vllm", "safetensors", "hibari", "yaml"}
    code = "import sys, triton_omni.backends.pipelines.chat.pipeline; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "triton_omni.backends.pipelines.chat.thinker" in loaded
    assert not heavy & loaded


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"input": ""}, "input"),
        ({"messages": HELLO}, "messages"),
        ({"modalities": ("text", "audio")}, "modalities"),
        ({"tools": ({"type": "function"},)}, "tools"),
    ],
)
def test_completions_that_are_refused(fields: dict[str, object], where: str) -> None:
    with pytest.raises(BadRequest) as caught:
        PIPELINE.check(GenerateRequest(**{"operation": "completion", "input": "Once", **fields}))  # type: ignore[arg-type]
    assert caught.value.where == where


def test_a_completion_opens_the_thinker_alone() -> None:
    request = GenerateRequest(operation="completion", input="Once upon a time")
    accepts(PIPELINE.check, request)
    assert PIPELINE.plan(request).needed == {"thinker"}
