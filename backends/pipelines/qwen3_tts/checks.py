# SPDX-License-Identifier: Apache-2.0
"""What can be refused before any stage works, naming the field: whatever the checkpoint, and by its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from triton_omni.backends.config.paths import models_dir
from triton_omni.backends.core.audio import check_rate
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Part, Sampling, stage_options
from triton_omni.backends.pipelines.qwen3_tts.checkpoint import Kind, TtsFacts, read_facts

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

TASK_TYPES: Mapping[str, Kind] = {"CustomVoice": "custom_voice", "VoiceDesign": "voice_design", "Base": "base"}
"""Published names → names in config.json."""


class TtsSampling(Sampling, frozen=True, omit_defaults=True):
    """`stages.talker` of a request: sampling of the codes, and

    text_per_frame  read one token of text per frame, instead of all before the first; None: as qwen-tts does, which is
                    per frame for recordings and whole for others
    task_type       kind of checkpoint that the client expects
    """

    text_per_frame: bool | None = None
    task_type: Literal["CustomVoice", "VoiceDesign", "Base"] | None = None


class SpeechChoice(NamedTuple):
    """What a request chooses of a checkpoint: names of its config.json, a voice only where it has some."""

    voice: str
    language: str
    text_per_frame: bool | None


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
    name = _full_name(language)
    if name != "auto" and name not in known:
        available = ", ".join(["auto", *known])
        raise BadRequest(f"unknown language '{language}'; available: {available}", "speech.language")
    return name


def _full_name(language: str | None) -> str:
    name = (language or "auto").lower()
    return LANGUAGE_CODES.get(name.partition("-")[0], name)


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


NEED_SEGMENTERS = ("japanese", "korean")
"""Written without spaces: the aligner's words come of packages that are not installed."""


def check_words(request: GenerateRequest, engine: Mapping[str, object]) -> None:
    """The check of stage `aligner`, which is needed only for words."""
    if not engine.get("model"):
        raise BadRequest("this deployment has no aligner: it cannot tell the times of words", "modalities")
    language = _full_name(request.speech.language)
    if language in NEED_SEGMENTERS:
        raise BadRequest(f"times of words are not made for {language}", "modalities")


# --- by config.json ---------------------------------------------------------------------------------------------------
def talker_options(request: GenerateRequest) -> TtsSampling:
    """What a request says of the talker: its `sampling`, and `stages.talker` on top."""
    given = msgspec.to_builtins(request.sampling) | request.stages.get("talker", {})
    return stage_options(given, TtsSampling, "talker")


def check_checkpoint(request: GenerateRequest, engine: Mapping[str, object]) -> None:
    """The check of stage `talker`, in the orchestrator. Where the checkpoint lies on another machine, the talker says
    the same a little later."""
    file = Path(models_dir(), str(engine.get("model", "")), "config.json")
    talker_options(request)
    if file.is_file():
        check_facts(request, _facts(file.parent, file.stat().st_mtime_ns))


@lru_cache(maxsize=4)
def _facts(folder: Path, written_ns: int) -> TtsFacts:
    """Read again when the file is written again."""
    return read_facts(folder)


def check_facts(request: GenerateRequest, facts: TtsFacts) -> SpeechChoice:
    """What the request chooses; raises BadRequest for what this checkpoint cannot serve."""
    options, recording = talker_options(request), recording_of(request)
    kind = facts.tts_model_type
    name = next(name for name, value in TASK_TYPES.items() if value == kind)
    if options.task_type not in (None, name):
        raise BadRequest(f"this checkpoint is a {name} (got {options.task_type})", "stages.talker.task_type")
    if kind == "base" and recording is None:
        raise BadRequest("a Base checkpoint speaks in the voice of a recording: send one audio part", "messages")
    if kind != "base" and recording is not None:
        raise BadRequest(f"a {name} checkpoint takes no recording; a Base checkpoint does", "messages")
    if request.speech.instructions and not facts.reads_instructions:
        size = " of 0.6B" if kind == "custom_voice" else ""
        raise BadRequest(f"a {name} checkpoint{size} follows no instructions", "speech.instructions")
    if kind == "voice_design" and not request.speech.instructions.strip():
        raise BadRequest("a VoiceDesign checkpoint needs a description of the voice", "speech.instructions")
    language = language_name(request.speech.language, tuple(facts.talker_config.codec_language_id))
    return SpeechChoice(_voice(request, facts), language, options.text_per_frame)


def _voice(request: GenerateRequest, facts: TtsFacts) -> str:
    voices, asked = facts.talker_config.spk_id, request.speech.voice
    if facts.tts_model_type != "custom_voice":
        if asked is not None:
            raise BadRequest(f"this checkpoint has no voices of its own (got '{asked}')", "speech.voice")
        return ""
    voice = next(iter(voices)) if asked is None else asked.lower()
    if voice not in voices:
        raise BadRequest(f"unknown voice '{asked}'; available: {', '.join(sorted(voices))}", "speech.voice")
    return voice
