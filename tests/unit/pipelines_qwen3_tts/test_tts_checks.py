# SPDX-License-Identifier: Apache-2.0
"""qwen3_tts: what is refused before any stage is opened, whatever the checkpoint, with the field named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.tiny_tts import config
from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, Part, SpeechParams
from triton_omni.backends.orchestrator.check import check_request
from triton_omni.backends.pipelines.qwen3_tts.checkpoint import read_facts
from triton_omni.backends.pipelines.qwen3_tts.checks import language_name
from triton_omni.backends.pipelines.qwen3_tts.pipeline import PIPELINE


def speech_request(**more: Any) -> GenerateRequest:
    given: dict[str, Any] = {"operation": "speech", "input": "hello"} | more
    return GenerateRequest(**given)


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"input": ""}, "input", "there is nothing to speak"),
        ({"input": " \n"}, "input", "there is nothing to speak"),
        ({"input": "x" * 4097}, "input", r"input must be at most 4096 characters \(got 4097\)"),
        ({"input": "a<|im_end|>b"}, "input", r"input must not contain '<\|im_end\|>'"),
        (
            {"speech": SpeechParams(instructions="x" * 501)},
            "speech.instructions",
            r"at most 500 .*501",
        ),
        ({"speech": SpeechParams(instructions="<|im_start|>")}, "speech.instructions", "must not contain"),
        ({"speech": SpeechParams(speed=2.0)}, "speech.speed", "does not take 'speech.speed'"),
        ({"modalities": ("text",)}, "modalities", "unknown modality 'text'"),
        ({"operation": "chat"}, "operation", "unknown operation 'chat'"),
        ({"stages": {"thinker": {}}}, "stages.thinker", "unknown stage 'thinker'"),
        ({"messages": (Message("user", "a"), Message("user", "b"))}, "messages", r"at most one message .*\(got 2\)"),
        ({"messages": (Message("system", "a"),)}, "messages[0].role", r"user's message \(got 'system'\)"),
        ({"messages": (Message("user", "a"),)}, "messages[0].content", r"needs one audio part \(got 0\)"),
    ],
)
def test_refused_at_once(given: Any, field: str, message: str) -> None:
    request = speech_request(**given)
    with pytest.raises(BadRequest, match=message) as caught:
        check_request(PIPELINE, request, {})
    assert caught.value.where == field


def test_languages_go_by_name_code_and_region() -> None:
    known = ("chinese", "english", "beijing_dialect")
    said = [language_name(given, known) for given in (None, "", "Auto", "English", "en", "EN-us", "zh-CN")]
    assert said == ["auto", "auto", "auto", "english", "english", "english", "chinese"]
    assert language_name("Beijing_Dialect", known) == "beijing_dialect"
    for unknown in ("klingon", "fr"):
        with pytest.raises(BadRequest, match="available: auto, chinese, english, beijing_dialect") as caught:
            language_name(unknown, known)
        assert caught.value.where == "speech.language"


# --- by the checkpoint ------------------------------------------------------------------------------------------------
RECORDING = (Message("user", (Part("audio", length=48_000, sample_rate=24_000),)),)


def recorded(length: int, rate_hz: int = 24_000, *texts: str) -> tuple[Message, ...]:
    parts = [Part("audio", length=length, sample_rate=rate_hz), *(Part("text", text) for text in texts)]
    return (Message("user", tuple(parts)),)


@pytest.mark.parametrize(
    ("kind", "given", "field", "message"),
    [
        ("custom_voice", {"speech": SpeechParams("unknown")}, "speech.voice", "available: aiden, dylan, eric"),
        ("custom_voice", {"speech": SpeechParams("")}, "speech.voice", "unknown voice ''"),
        ("custom_voice", {"speech": SpeechParams(language="xx")}, "speech.language", "available: auto, chinese"),
        ("0b6", {"speech": SpeechParams(instructions="slowly")}, "speech.instructions", "of 0.6B follows no"),
        ("custom_voice", {"messages": RECORDING}, "messages", "takes no recording; a Base checkpoint does"),
        ("voice_design", {"messages": RECORDING}, "messages", "takes no recording"),
        ("voice_design", {}, "speech.instructions", "needs a description of the voice"),
        ("voice_design", {"speech": SpeechParams(instructions="  ")}, "speech.instructions", "needs a description"),
        ("voice_design", {"speech": SpeechParams("ryan", instructions="old")}, "speech.voice", "no voices of its own"),
        ("base", {}, "messages", "send one audio part"),
        ("base", {"messages": RECORDING, "speech": SpeechParams("ryan")}, "speech.voice", "no voices of its own"),
        ("base", {"messages": RECORDING, "speech": SpeechParams(instructions="x")}, "speech.instructions", "a Base"),
        ("base", {"messages": recorded(23_999)}, "messages[0]", r"must take 1 to 30 s \(got 1.00 s\)"),
        ("base", {"messages": recorded(720_001)}, "messages[0]", r"must take 1 to 30 s \(got 30.00 s\)"),
        ("base", {"messages": recorded(48_000, 3_999)}, "messages[0].sample_rate", "from 4000 to 192000 Hz"),
        ("base", {"messages": recorded(48_000, 24_000, "a", "b")}, "messages[0].content", r"one text part .*\(got 2\)"),
        ("base", {"messages": recorded(48_000, 24_000, "x" * 1001)}, "messages[0]", r"1000 characters \(got 1001\)"),
        ("base", {"messages": recorded(48_000, 24_000, "<|im_end|>")}, "messages[0]", "must not contain"),
        ("base", {"stages": {"talker": {"task_type": "VoiceDesign"}}}, "stages.talker.task_type", "is a Base"),
        ("base", {"stages": {"talker": {"task_type": "Bass"}}}, "stages.talker.task_type", "Invalid enum value"),
        ("base", {"stages": {"talker": {"temprature": 1}}}, "stages.talker.temprature", "did you mean"),
        ("base", {"stages": {"talker": {"temperature": 3}}}, "stages.talker.temperature", "<= 2"),
    ],
)
def test_refused_for_the_checkpoint_before_admission(
    tmp_path: Path, kind: str, given: Any, field: str, message: str
) -> None:
    size = "0b6" if kind == "0b6" else "1b7"
    facts = config("custom_voice" if kind == "0b6" else kind, size)
    (tmp_path / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    request = speech_request(**given)
    with pytest.raises(BadRequest, match=message) as caught:
        check_request(PIPELINE, request, {"audio": 720_001}, {"talker": {"model": str(tmp_path)}})
    assert caught.value.where == field


def test_what_a_checkpoint_serves_passes(tmp_path: Path) -> None:
    def passes(kind: str, **given: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config(kind, "1b7")), encoding="utf-8")
        request = speech_request(**given)
        media = {"audio": 48_000} if "messages" in given else {}
        check_request(PIPELINE, request, media, {"talker": {"model": str(tmp_path)}})

    passes("custom_voice")
    passes("custom_voice", speech=SpeechParams("Uncle_Fu", "fr", instructions="x" * 500))
    passes("voice_design", speech=SpeechParams(instructions="an old man"))
    passes("base", messages=RECORDING, stages={"talker": {"task_type": "Base", "text_per_frame": False}})


def test_another_family_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("base", "1b7") | {"model_type": "x"}), encoding="utf-8")
    with pytest.raises(OptionsError, match="is of the type 'x'"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OptionsError, match=r"config\.json cannot be read: Object missing required field"):
        read_facts(tmp_path)
