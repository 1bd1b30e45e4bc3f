# SPDX-License-Identifier: Apache-2.0
"""What can be refused before any stage works, naming the field, whatever the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triton_omni.backends.core.audio import check_rate
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Part

MAX_INPUT_CHARS = 4096
MAX_INSTRUCTIONS_CHARS = 500
MAX_TRANSCRIPT_CHARS = 1000
RECORDING_S = (1.0, 30.0)
"""Shortest and longest recording of a voice."""
LANGUAGE_CODES = {
    "zh": "chinese", "en": "english", "de": "german", "it": "italian", "pt": "portuguese", "es": "spanish",
    "ja": "japanese", "ko": "korean", "fr": "french", "ru": "russian",
}  # fmt: skip
"""ISO 639-1 → the checkpoint's name."""
MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""Texts that the model would read as the end of a turn."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The voice to speak in: one audio part of a user message. With `transcript`, the model goes on from what the
    recording says; without one it takes the voice alone."""

    part: Part
    transcript: str

    @property
    def field(self) -> str:
        return "messages[0]"


def recording_of(request: GenerateRequest) -> Recording | None:
    """The request's recording, if it has one. Raises BadRequest naming the field for other messages."""
    if not request.messages:
        return None
    message, *others = request.messages
    if others:
        raise BadRequest(f"at most one message is allowed, with a recording (got {len(request.messages)})", "messages")
    if message.role != "user":
        raise BadRequest(f"a recording belongs in a user's message (got '{message.role}')", "messages[0].role")
    audio = [part for part in message.parts if part.type == "audio"]
    texts = [part.text for part in message.parts if part.type == "text"]
    if len(audio) != 1:
        raise BadRequest(f"the message needs one audio part (got {len(audio)})", "messages[0].content")
    if len(texts) > 1:
        raise BadRequest(f"at most one text part is allowed, the transcript (got {len(texts)})", "messages[0].content")
    return Recording(audio[0], texts[0].strip() if texts else "")


def language_name(language: str | None, known: Sequence[str]) -> str:
    """The checkpoint's name of a language, given by name, ISO code (also with a region) or "auto".

    Raises BadRequest naming what there is.
    """
    name = (language or "auto").lower()
    name = LANGUAGE_CODES.get(name.partition("-")[0], name)
    if name != "auto" and name not in known:
        available = ", ".join(["auto", *known])
        raise BadRequest(f"unknown language '{language}'; available: {available}", "speech.language")
    return name


def check(request: GenerateRequest) -> None:
    """The pipeline's check."""
    if not request.input.strip():
        raise BadRequest("there is nothing to speak", "input")
    _check_text(request.input, MAX_INPUT_CHARS, "input")
    _check_text(request.speech.instructions, MAX_INSTRUCTIONS_CHARS, "speech.instructions")
    recording = recording_of(request)
    if recording is not None:
        _check_recording(recording)


def _check_text(text: str, most: int, where: str) -> None:
    name = where.rpartition(".")[2]
    if len(text) > most:
        raise BadRequest(f"{name} must be at most {most} characters (got {len(text)})", where)
    for mark in MARKS:
        if mark in text:
            raise BadRequest(f"{name} must not contain '{mark}'", where)


def _check_recording(recording: Recording) -> None:
    part, where = recording.part, recording.field
    check_rate(part.sample_rate, f"{where}.sample_rate")
    seconds = part.length / part.sample_rate
    if not RECORDING_S[0] <= seconds <= RECORDING_S[1]:
        least, most = RECORDING_S
        raise BadRequest(f"the recording must take {least:g} to {most:g} s (got {seconds:.2f} s)", where)
    if len(recording.transcript) > MAX_TRANSCRIPT_CHARS:
        got = len(recording.transcript)
        raise BadRequest(f"the transcript must be at most {MAX_TRANSCRIPT_CHARS} characters (got {got})", where)
    for mark in MARKS:
        if mark in recording.transcript:
            raise BadRequest(f"the transcript must not contain '{mark}'", where)
