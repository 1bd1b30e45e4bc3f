# SPDX-License-Identifier: Apache-2.0
"""qwen3_tts: what is refused before any stage is opened, whatever the checkpoint, with the field named."""

from __future__ import annotations

from typing import Any

import pytest

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, SpeechParams
from triton_omni.backends.orchestrator.check import check_request
from triton_omni.backends.pipelines.qwen3_tts.checks import language_name
from triton_omni.backends.pipelines.qwen3_tts.pipeline import PIPELINE


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
    request = GenerateRequest(**({"operation": "speech", "input": "hello"} | given))
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
