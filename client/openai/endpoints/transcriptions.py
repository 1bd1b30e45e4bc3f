# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/transcriptions: the text of an audio file, with times on request. The body is a form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from triton_omni import subtitles
from triton_omni.backends.wire import (
    Deadlines,
    Event,
    GenerateRequest,
    Message,
    Part,
    TranscriptionParams,
    TranscriptPiece,
)
from triton_omni.media import Media
from triton_omni.openai.endpoints.chat_request import language_of
from triton_omni.openai.endpoints.messages import media_errors
from triton_omni.openai.endpoints.schemas import Json, TranscriptionBody
from triton_omni.openai.endpoints.speech import word_dicts
from triton_omni.openai.http import sse
from triton_omni.openai.http.calls import BackendCall, open_pieces
from triton_omni.openai.http.context import context_of
from triton_omni.openai.http.errors import ApiError, invalid, missing, unsupported
from triton_omni.openai.http.forms import file_in, opened_form, parse_form
from triton_omni.pieces import Piece

PARAMS = {"messages": "file", "messages[0].content[0]": "file", "audio": "file"}
GRANULARITIES = "timestamp_granularities[]"


@dataclass
class Transcript:
    """Segments and words as they arrive."""

    segments: list[Json] = field(default_factory=list[Json])
    words: list[Json] = field(default_factory=list[Json])
    language: str = ""
    end: Event = field(default_factory=lambda: Event("end"))

    def on(self, piece: Piece) -> str:
        """Take a piece; returns its text."""
        if piece.event.type == "end":
            self.end = piece.event
        segment = piece.event.piece
        if not isinstance(segment, TranscriptPiece):
            return ""
        self.language = segment.language or self.language
        facts = {name: getattr(segment.decoding, name) for name in segment.decoding.__struct_fields__}
        self.segments.append(
            {"id": len(self.segments), "start": segment.start_s, "end": segment.end_s, "text": segment.text, **facts}
        )
        self.words += word_dicts(segment.words)
        return segment.text

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment["text"] for segment in self.segments)

    @property
    def phrases(self) -> list[subtitles.Phrase]:
        """The segments for subtitles."""
        return [subtitles.Phrase(s["start"], s["end"], s["text"]) for s in self.segments]

    @property
    def usage(self) -> Json:
        """OpenAI counts the seconds of the audio."""
        return {"type": "duration", "seconds": math.ceil(self.end.usage.get("audio_input_s", 0))}

    def events(self, run: int, piece: Piece) -> Iterable[bytes]:
        """The same as server-sent events."""
        if delta := self.on(piece):
            yield _event("transcript.text.delta", {"delta": delta})
        if piece.event.type == "end":
            yield _event("transcript.text.done", {"text": self.text, **_token_usage(piece.event)})


async def transcribe(request: Request) -> Response:
    """Transcribe an audio file."""
    context = context_of(request)
    pools = context.services.pools
    media = Media(context.share.take)
    async with opened_form(request) as form:
        body = parse_form(TranscriptionBody, form, ("file",), context.ignored)
        _check(body)
        if "file" not in form:
            raise missing("file")
        if len(form.getlist("file")) > 1:
            raise invalid("file", "There is one file at most.")
        context.check_model(body.model)
        await context.services.catalogue.check_media(body.model, "audio", "file")
        data = await file_in(form["file"], "file")
    with media_errors("file", "invalid_audio"):
        part = await pools.decode(media.audio, data)
    pieces = await open_pieces(context, _call(body, part, media))
    transcript = Transcript()
    if body.stream:
        await pieces.begin()
        return sse.response(sse.body(pools, pieces, transcript.events))
    async for _, piece in pieces:
        transcript.on(piece)
    return RESPONSES[body.response_format or "json"](transcript, body)


async def translate(request: Request) -> Response:
    """POST /v1/audio/translations: no pipeline translates."""
    message = "No model here translates audio; /v1/audio/transcriptions transcribes it in its own language."
    raise ApiError(400, message, code="unsupported_value", param="model")


def _check(body: TranscriptionBody) -> None:
    """Refuse what the types cannot. Raises ApiError naming the parameter."""
    if body.stream and body.response_format not in (None, "json", "text"):
        raise unsupported("response_format", f"A stream carries text alone, not '{body.response_format}'.")
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise invalid(GRANULARITIES, "Times are part of the 'response_format' 'verbose_json'.")


def _call(body: TranscriptionBody, part: Part, media: Media) -> BackendCall:
    with_words = "word" in (body.timestamp_granularities or ())
    request = GenerateRequest(
        operation="transcription",
        messages=(Message("user", (part,)),),
        transcription=TranscriptionParams(language_of(body.language), with_words),
        stages=body.stages or {},
        deadlines=body.deadlines or Deadlines(),
        priority=body.priority or 0,
    )
    error = unsupported(GRANULARITIES, f"'{body.model}' does not provide the times of single words.")
    errors = {"transcription": error, "transcription.word_timestamps": error} if with_words else {}
    return BackendCall(body.model, request, PARAMS, media.tensors, errors=errors)


def _token_usage(end: Event) -> Json:
    """The `usage` of a stream, which OpenAI counts in tokens; nothing where the pipeline does not count them."""
    if "completion_tokens" not in end.usage:
        return {}
    read, written = (int(end.usage.get(name, 0)) for name in ("prompt_tokens", "completion_tokens"))
    return {"usage": {"type": "tokens", "input_tokens": read, "output_tokens": written, "total_tokens": read + written}}


def _json(transcript: Transcript, body: TranscriptionBody) -> Response:
    return JSONResponse({"text": transcript.text, "usage": transcript.usage})


def _text(transcript: Transcript, body: TranscriptionBody) -> Response:
    return PlainTextResponse(f"{transcript.text}\n")


def _verbose(transcript: Transcript, body: TranscriptionBody) -> Response:
    times = set(body.timestamp_granularities or ())
    answer: Json = {
        "task": "transcribe", "language": transcript.language, "text": transcript.text,
        "duration": transcript.end.usage.get("audio_input_s", 0), "usage": transcript.usage,
    }  # fmt: skip
    if times != {"word"}:
        answer["segments"] = transcript.segments
    if "word" in times:
        answer["words"] = transcript.words
    return JSONResponse(answer)


def _srt(transcript: Transcript, body: TranscriptionBody) -> Response:
    return PlainTextResponse(subtitles.srt(transcript.phrases), media_type="application/x-subrip")


def _vtt(transcript: Transcript, body: TranscriptionBody) -> Response:
    return PlainTextResponse(subtitles.vtt(transcript.phrases), media_type="text/vtt")


RESPONSES: dict[str, Callable[[Transcript, TranscriptionBody], Response]] = {
    "json": _json, "text": _text, "verbose_json": _verbose, "srt": _srt, "vtt": _vtt,
}  # fmt: skip


def _event(kind: str, content: Json) -> bytes:
    return sse.data({"type": kind, **content}, kind)
