# SPDX-License-Identifier: Apache-2.0
"""What can be refused before any stage works, naming the field."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from triton_omni.backends.ar.completions import COMPLETION, check_completion
from triton_omni.backends.ar.sampling import stage_sampling
from triton_omni.backends.codec.engine import RunOptions
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, stage_options, with_stage_options
from triton_omni.backends.pipelines.chat.clauses import UNREADABLE, estimated_speech_s, speakable
from triton_omni.backends.pipelines.chat.options import MAX_AUDIO_S
from triton_omni.backends.pipelines.chat.thinker import check_messages

VOICES = ("heart",)
LANGUAGES = ("en", "en-us")
STAGES = ("transcriber", "thinker", "talker", "code2wav")
MAX_INPUT_CHARS = 4096
MAX_SPEECH_S = 3600
"""Longest speech of one request, estimated: 4,096 characters of English at speed 0.25 take about 1,100 s."""


def check(request: GenerateRequest) -> None:
    """The pipeline's check."""
    voice = request.speech.voice
    if voice not in (None, *VOICES):
        raise BadRequest(f"unknown voice '{voice}'; available: {', '.join(VOICES)}", "speech.voice")
    for part, language in (("speech", request.speech.language), ("transcription", request.transcription.language)):
        if language and language.lower() not in LANGUAGES:
            message = f"unknown language '{language}'; available: {', '.join(LANGUAGES)}"
            raise BadRequest(message, f"{part}.language")
    if request.operation == "chat":
        _check_chat(request)
    if request.operation == "speech":
        _check_speech(request)
    if request.operation == "transcription":
        _check_transcription(request)
    if request.operation == COMPLETION:
        check_completion(request)
    _check_options(request)


def check_audio(request: GenerateRequest, engine: Mapping[str, object]) -> None:
    """The transcriber's check, with its engine options: the seconds of all audio parts together."""
    most_s = msgspec.convert(engine.get("max_audio_s", MAX_AUDIO_S), float)
    parts = [part for message in request.messages for part in message.parts if part.type == "audio"]
    seconds = sum(part.length / part.sample_rate for part in parts if part.sample_rate)
    if seconds > most_s:
        raise BadRequest(f"audio must be at most {most_s:g} s (got {seconds:.1f})", "audio")


def _check_chat(request: GenerateRequest) -> None:
    check_messages(request)
    if request.input:
        raise BadRequest("operation 'chat' reads messages; 'input' belongs to operation 'speech'", "input")


def _check_speech(request: GenerateRequest) -> None:
    if request.messages:
        raise BadRequest("operation 'speech' speaks 'input'; messages belong to operation 'chat'", "messages")
    if request.open_input:
        return  # what is there now is a beginning; clauses without anything to say are left out
    if not request.input.strip():
        raise BadRequest("there is nothing to speak", "input")
    if len(request.input) > MAX_INPUT_CHARS:
        raise BadRequest(f"input must be at most {MAX_INPUT_CHARS} characters (got {len(request.input)})", "input")
    if not speakable(request.input):
        raise BadRequest(UNREADABLE, "input")
    speech_s = estimated_speech_s(request.input) / request.speech.speed
    if speech_s > MAX_SPEECH_S:
        raise BadRequest(
            f"the speech must take at most {MAX_SPEECH_S} s (about {speech_s:.0f} s at speed {request.speech.speed})",
            "input",
        )


def _check_transcription(request: GenerateRequest) -> None:
    if request.input:
        raise BadRequest(
            "operation 'transcription' reads the audio of messages; 'input' belongs to operation 'speech'", "input"
        )
    for i, message in enumerate(request.messages):
        if any(part.type != "audio" for part in message.parts):
            raise BadRequest("operation 'transcription' takes audio only", f"messages[{i}]")
    if not request.messages:
        raise BadRequest("there is no audio to transcribe", "messages")


def _check_options(request: GenerateRequest) -> None:
    """Options for single stages, by the stage that reads them."""
    for stage, given in request.stages.items():
        if stage not in STAGES:
            raise BadRequest(f"unknown stage '{stage}'; stages: {', '.join(STAGES)}", f"stages.{stage}")
        if stage == "thinker":
            stage_sampling(given, request.sampling, stage)
        elif stage == "code2wav":
            stage_options(given, RunOptions, stage)
        elif stage == "transcriber":
            with_stage_options(request.transcription, given, stage)
        elif given:
            key = next(iter(given))
            raise BadRequest(f"unknown option '{key}'; stage '{stage}' has none", f"stages.{stage}.{key}")
