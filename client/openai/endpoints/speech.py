# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/speech and /dev/captioned_speech: text to audio, sent as it is made, with the times of its words."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from triton_omni.backends.wire import (
    AudioPiece,
    Deadlines,
    GenerateRequest,
    Message,
    Part,
    SpeechParams,
    WordsPiece,
    WordTime,
)
from triton_omni.media import Media
from triton_omni.openai.endpoints.chat_answer import usage_of
from triton_omni.openai.endpoints.chat_request import language_of, name_of
from triton_omni.openai.endpoints.schemas import CaptionedSpeechBody, Json, SpeechBody, SpeechStreamConfig
from triton_omni.openai.endpoints.voices import VoiceSample, sample_of
from triton_omni.openai.http import sse
from triton_omni.openai.http.bodies import read_json
from triton_omni.openai.http.calls import BackendCall, BrokenOff, PieceStream, open_pieces
from triton_omni.openai.http.context import RequestContext, context_of
from triton_omni.openai.http.errors import ApiError, invalid, missing, unsupported
from triton_omni.openai.http.recordings import RECORDING_HZ
from triton_omni.openai.media import audio
from triton_omni.pieces import Piece

WORDS_HEADER = "X-Word-Timestamps"
MAX_HEADER_BYTES = 4096


async def speak(request: Request) -> Response:
    """Speak a text."""
    context = context_of(request)
    body = await read_json(request, SpeechBody)
    file_format = body.response_format or "mp3"
    pieces = await open_pieces(context, await speech_call(body, context))
    writer = SpeechWriter(file_format, with_words=body.with_words)
    if body.stream_format == "sse":
        await pieces.begin()
        return sse.response(sse.body(context.services.pools, pieces, writer.events))
    if body.with_words:  # they stand in the head, so all of the audio waits for the last of them
        data = b"".join([writer.encoded(piece) async for _, piece in pieces])
        return Response(data, media_type=audio.MEDIA_TYPES[file_format], headers=_words_header(writer.words))
    first = await _first_bytes(pieces, writer)
    return StreamingResponse(_rest(first, pieces, writer), media_type=audio.MEDIA_TYPES[file_format])


async def speak_captioned(request: Request) -> Response:
    """Speak a text with the times of its words, a line of JSON per piece of audio, or one with all of it."""
    context = context_of(request)
    body = await read_json(request, CaptionedSpeechBody)
    pieces = await open_pieces(context, await speech_call(body, context))
    writer = SpeechWriter(body.response_format or "mp3", with_words=body.with_words)
    if body.stream is not False:
        await pieces.begin()
        return StreamingResponse(_caption_lines(pieces, writer), media_type="application/x-ndjson")
    data = b"".join([writer.encoded(piece) async for _, piece in pieces])
    return Response(writer.caption(data, writer.words), media_type="application/json")


async def speech_call(
    body: SpeechBody | CaptionedSpeechBody | SpeechStreamConfig, context: RequestContext
) -> BackendCall:
    """The call. Raises ApiError naming the parameter."""
    is_stream = isinstance(body, SpeechStreamConfig)
    text = "" if is_stream else body.input
    if not text.strip() and not is_stream:
        raise missing("input")
    instructions = None if isinstance(body, CaptionedSpeechBody) else body.instructions
    sample = await _sample(body, context)
    media = Media(context.share.take)
    voice = None if sample is not None else context.services.voice_of(name_of(body.voice)) if body.voice else None
    request = GenerateRequest(
        operation="speech",
        input=text,
        open_input=is_stream,
        messages=() if sample is None else (_recording(sample, media),),
        modalities=(AudioPiece.kind, WordsPiece.kind) if body.with_words else (),
        speech=SpeechParams(voice, language_of(body.language), body.speed or 1.0, instructions or ""),
        stages=body.stages or {},
        deadlines=body.deadlines or Deadlines(),
        priority=body.priority or 0,
    )
    errors: dict[str, ApiError] = {}
    if body.with_words:
        errors["modalities"] = unsupported(body.words_param, f"'{body.model}' does not provide the times of words.")
    if is_stream:
        errors["open_input"] = unsupported("model", f"'{body.model}' speaks only a text that is complete.")
    params: dict[str, str] = {}
    if sample is not None:
        own_voices = unsupported(sample.param, f"'{body.model}' speaks in its own voices only; it clones none.")
        errors |= {"messages": own_voices, "messages[0].content[0]": own_voices}
        params = dict.fromkeys(("messages[0]", "messages[0].content", "messages[0].sample_rate"), sample.param)
    return BackendCall(body.model, request, params, media.tensors, errors=errors)


async def _sample(
    body: SpeechBody | CaptionedSpeechBody | SpeechStreamConfig, context: RequestContext
) -> VoiceSample | None:
    """The recording whose voice is to speak, if there is one. Raises ApiError."""
    context.check_model(body.model)
    if not isinstance(body, SpeechBody):
        return await sample_of(context, body.voice, None, None, True)
    if body.ref_audio is None and (body.ref_text is not None or body.x_vector_only_mode is not None):
        param = "ref_text" if body.ref_text is not None else "x_vector_only_mode"
        raise invalid(param, f"'{param}' is about the recording in 'ref_audio', which is missing.")
    if body.ref_audio is not None and body.x_vector_only_mode is False and not (body.ref_text or "").strip():
        raise missing("ref_text")
    if body.ref_audio is not None:
        await context.services.catalogue.check_media(body.model, "audio", "ref_audio")
    elif body.voice is None and (body.instructions or "").strip():
        return None  # instructions may describe the voice (VoiceDesign)
    return await sample_of(context, body.voice, body.ref_audio, body.ref_text, body.x_vector_only_mode is not True)


def _recording(sample: VoiceSample, media: Media) -> Message:
    """A user's message with the recording, and with what is said in it where that is known."""
    part = media.audio(sample.samples, RECORDING_HZ)
    return Message("user", (part, Part("text", sample.transcript)) if sample.transcript else (part,))


def _words_header(words: Sequence[WordTime] | None) -> dict[str, str]:
    """Word times in milliseconds as a header; one that clients might refuse for its size is left out, which another
    header says. Null: they could not be found."""
    times = None if words is None else [
        {"word": w.word, "start_ms": round(w.start_s * 1000), "end_ms": round(w.end_s * 1000)} for w in words
    ]  # fmt: skip
    text = json.dumps(times, separators=(",", ":"))
    return {WORDS_HEADER: text} if len(text) <= MAX_HEADER_BYTES else {f"{WORDS_HEADER}-Omitted": f"{len(text)} bytes"}


class SpeechWriter:
    """Pieces of audio → the bytes of one file in its format, and the words that were said.

    words           so far; None if they were not asked for, or could not be found
    sample_rate_hz  of the file; 0 before the first audio
    """

    def __init__(self, file_format: str, *, with_words: bool = False, may_be_silent: bool = False) -> None:
        """`may_be_silent`: no audio at all is an empty file, not an error."""
        self.words: list[WordTime] | None = [] if with_words else None
        self.sample_rate_hz = 0
        self._may_be_silent = may_be_silent
        self._with_words = with_words
        self._file_format = file_format
        self._encoder: audio.Encoder | None = None

    def encoded(self, piece: Piece) -> bytes:
        """Bytes that are ready after a piece; after the end, the rest."""
        data = b""
        if piece.audio is not None and piece.audio.size:
            if self._encoder is None:
                self.sample_rate_hz = audio.PCM_HZ if self._file_format == "pcm" else piece.sample_rate_hz
                self._encoder = audio.encoder(self._file_format, piece.sample_rate_hz)
            data = self._encoder.feed(piece.audio)
        if self.words is not None:
            self.words += words_of(piece)
        if piece.event.type == "end":
            if WordsPiece.kind in piece.event.missing:
                self.words = None
            if self._encoder is not None:
                data += self._encoder.finish()
            elif not self._may_be_silent:
                raise invalid("input", "There is nothing in 'input' that could be spoken.")
        return data

    def events(self, run: int, piece: Piece) -> Iterable[bytes]:
        """The same as server-sent events."""
        if data := self.encoded(piece):
            delta = {"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()}
            yield sse.data(delta, "speech.audio.delta")
        if words := words_of(piece):
            yield sse.data({"type": "speech.audio.words", "words": word_dicts(words)}, "speech.audio.words")
        if piece.event.type == "end":
            counts = usage_of(piece.event)
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "output_tokens": counts["completion_tokens"],
                "total_tokens": counts["total_tokens"],
            }
            done: Json = {"type": "speech.audio.done", "usage": usage}
            if self._with_words:
                done["words"] = None if self.words is None else word_dicts(self.words)
            yield sse.data(done, "speech.audio.done")

    def caption(self, data: bytes, words: Sequence[WordTime] | None) -> bytes:
        """Audio and the words in it as a line of JSON."""
        times = None if words is None else [
            {"word": w.word, "start_time": w.start_s, "end_time": w.end_s} for w in words
        ]  # fmt: skip
        line = {
            "audio": base64.b64encode(data).decode(), "audio_format": audio.MEDIA_TYPES[self._file_format],
            "timestamps": times,
        }  # fmt: skip
        return msgspec.json.encode(line) + b"\n"


def word_dicts(words: Sequence[WordTime]) -> list[Json]:
    """Word times as OpenAI writes those of transcripts."""
    return [{"word": word.word, "start": word.start_s, "end": word.end_s} for word in words]


def words_of(piece: Piece) -> Sequence[WordTime]:
    """The words that a piece has times for."""
    return piece.event.piece.words if isinstance(piece.event.piece, WordsPiece) else ()


async def _caption_lines(pieces: PieceStream, writer: SpeechWriter) -> AsyncIterator[bytes]:
    """A line per piece of audio, with the words that came before it; the last one may have none."""
    words: list[WordTime] = []
    try:
        async for _, piece in pieces:
            words += words_of(piece)
            data = writer.encoded(piece)
            if data or (piece.event.type == "end" and words):
                yield writer.caption(data, words)
                words = []
    except ApiError as error:
        yield msgspec.json.encode(error.body) + b"\n"


async def _first_bytes(pieces: PieceStream, writer: SpeechWriter) -> bytes:
    """The first audio: until then an error still has a status of its own."""
    async for _, piece in pieces:
        if data := writer.encoded(piece):
            return data
    return b""


async def _rest(first: bytes, pieces: PieceStream, writer: SpeechWriter) -> AsyncIterator[bytes]:
    """All bytes. An error here cuts the connection: a file that ends early must not look complete."""
    yield first
    try:
        async for _, piece in pieces:
            if data := writer.encoded(piece):
                yield data
    except ApiError as error:
        raise BrokenOff(error.message) from error
