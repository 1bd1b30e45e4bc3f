# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/transcriptions: the words in a sound file, with their times if the client wants them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from triton_omni import subtitles
from triton_omni.backends.wire import Event, GenerateRequest, Message, TranscriptionParams
from triton_omni.media import Media
from triton_omni.openai.endpoints import extras
from triton_omni.openai.endpoints.messages import blaming
from triton_omni.openai.http import sse
from triton_omni.openai.http.calls import Call, open_pieces, shared_of
from triton_omni.openai.http.errors import ApiError, invalid, missing, unsupported
from triton_omni.openai.http.fields import Fields
from triton_omni.openai.http.forms import fields_of, file_in, opened_form
from triton_omni.openai.http.pools import in_thread
from triton_omni.pieces import Piece

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
PARAMS = {"messages": "file", "messages[0].content[0]": "file", "audio": "file"}
GRANULARITIES = "timestamp_granularities[]"
Json = dict[str, Any]


@dataclass(frozen=True)
class Wish:
    """How the client wants its transcript."""

    model: str
    response_format: str
    is_stream: bool
    times: frozenset[str]
    options: Json

    @property
    def errors(self) -> dict[str, ApiError]:
        """What to say where the pipeline does not know the times of words."""
        if "word" not in self.times:
            return {}
        error = unsupported(GRANULARITIES, f"'{self.model}' does not know when single words are said.")
        return {"transcription": error, "transcription.word_timestamps": error}


@dataclass
class Transcript:
    """Segments and words as they come."""

    times: frozenset[str]
    segments: list[Json] = field(default_factory=list[Json])
    words: list[Json] = field(default_factory=list[Json])
    language: str = ""
    end: Event = field(default_factory=lambda: Event("end"))

    def on(self, piece: Piece) -> str:
        """Take a piece; returns its text."""
        if piece.event.type == "end":
            self.end = piece.event
        if piece.event.type != "transcript" or piece.text is None:
            return ""
        meta = piece.event.meta
        self.language = meta.get("language", self.language)
        self.segments.append(
            {"id": len(self.segments), "start": meta["start_s"], "end": meta["end_s"], "text": piece.text}
        )
        self.words += [
            {"word": word["word"], "start": word["start_s"], "end": word["end_s"]} for word in meta.get("words", ())
        ]
        return piece.text

    @property
    def text(self) -> str:
        """All words."""
        return "".join(segment["text"] for segment in self.segments)

    @property
    def phrases(self) -> list[subtitles.Phrase]:
        """The segments for subtitles."""
        return [subtitles.Phrase(s["start"], s["end"], s["text"]) for s in self.segments]

    @property
    def usage(self) -> Json:
        """OpenAI counts the sound that was heard by the second."""
        return {"type": "duration", "seconds": math.ceil(self.end.usage.get("audio_input_s", 0))}

    def events(self, run: int, piece: Piece) -> Iterable[bytes]:
        """The same as server-sent events."""
        if delta := self.on(piece):
            yield _event("transcript.text.delta", {"delta": delta})
        if piece.event.type == "end":
            yield _event("transcript.text.done", {"text": self.text, "usage": self.usage})


async def transcribe(request: Request) -> Response:
    """Write down what is said."""
    pools = shared_of(request).pools
    media = Media(request.state.share.take)
    async with opened_form(request) as form:
        wish = read_wish(fields_of(form, ("file",)))
        if "file" not in form:
            raise missing("file")
        if len(form.getlist("file")) > 1:
            raise invalid("file", "There is one file at most.")
        data = await file_in(form["file"], "file")
    with blaming("file", "invalid_audio"):
        part = await in_thread(pools.media, media.audio, data)
    asked = GenerateRequest(operation="transcription", messages=(Message("user", (part,)),), **wish.options)
    pieces = await open_pieces(request, Call(wish.model, asked, PARAMS, media.tensors, errors=wish.errors))
    transcript = Transcript(wish.times)
    if wish.is_stream:
        await pieces.begin()
        return sse.response(sse.body(pools, pieces, transcript.events))
    async for _, piece in pieces:
        transcript.on(piece)
    return ANSWERS[wish.response_format](transcript)


async def translate(request: Request) -> Response:
    """POST /v1/audio/translations: nothing here translates."""
    message = "No model here translates speech; /v1/audio/transcriptions writes it down in its own language."
    raise ApiError(400, message, code="unsupported_value", param="model")


def read_wish(fields: Fields) -> Wish:
    """The fields beside the file. Raises ApiError naming the parameter."""
    model = fields.text("model", needed=True) or ""
    response_format = fields.choice("response_format", FORMATS, "json") or "json"
    is_stream = fields.flag("stream")
    if is_stream and response_format not in ("json", "text"):
        raise unsupported("response_format", f"A stream carries text alone, not '{response_format}'.")
    times = fields.items(GRANULARITIES) or []
    for granularity in times:
        if granularity not in ("word", "segment"):
            raise unsupported(GRANULARITIES, f"Times are known by 'word' and 'segment', not by '{granularity}'.")
        if response_format != "verbose_json":
            raise invalid(GRANULARITIES, "Times are part of the 'response_format' 'verbose_json'.")
    if fields.text("prompt"):
        raise unsupported("prompt", "A prompt is not supported here.")
    if fields.number("temperature", 0, 1):
        raise unsupported("temperature", "The likeliest words are written down: 'temperature' can only be 0.")
    options = extras.request(fields)
    options["transcription"] = TranscriptionParams(fields.text("language", most=100), "word" in times)
    fields.choice("chunking_strategy", ("auto",))
    fields.nothing_else()
    return Wish(model, response_format, is_stream, frozenset(times), options)


def _json(transcript: Transcript) -> Response:
    return JSONResponse({"text": transcript.text, "usage": transcript.usage})


def _text(transcript: Transcript) -> Response:
    return PlainTextResponse(f"{transcript.text}\n")


def _verbose(transcript: Transcript) -> Response:
    answer: Json = {
        "task": "transcribe", "language": transcript.language, "text": transcript.text,
        "duration": transcript.end.usage.get("audio_input_s", 0), "usage": transcript.usage,
    }  # fmt: skip
    if transcript.times != {"word"}:
        answer["segments"] = transcript.segments
    if "word" in transcript.times:
        answer["words"] = transcript.words
    return JSONResponse(answer)


def _srt(transcript: Transcript) -> Response:
    return PlainTextResponse(subtitles.srt(transcript.phrases), media_type="application/x-subrip")


def _vtt(transcript: Transcript) -> Response:
    return PlainTextResponse(subtitles.vtt(transcript.phrases), media_type="text/vtt")


ANSWERS: dict[str, Callable[[Transcript], Response]] = {
    "json": _json, "text": _text, "verbose_json": _verbose, "srt": _srt, "vtt": _vtt,
}  # fmt: skip


def _event(kind: str, content: Json) -> bytes:
    return sse.data({"type": kind, **content}, kind)
