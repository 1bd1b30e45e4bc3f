# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/speech: text to audio, sent as it is made."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from triton_omni.backends.wire import Deadlines, GenerateRequest, SpeechParams
from triton_omni.openai.endpoints.chat_answer import usage_of
from triton_omni.openai.endpoints.chat_request import name_of
from triton_omni.openai.endpoints.schemas import SpeechBody
from triton_omni.openai.http import sse
from triton_omni.openai.http.bodies import read_json
from triton_omni.openai.http.calls import BackendCall, BrokenOff, PieceStream, open_pieces
from triton_omni.openai.http.context import Services, context_of
from triton_omni.openai.http.errors import ApiError, invalid, missing
from triton_omni.openai.media import audio
from triton_omni.pieces import Piece


async def speak(request: Request) -> Response:
    """Speak a text."""
    context = context_of(request)
    body = await read_json(request, SpeechBody)
    file_format = body.response_format or "mp3"
    pieces = await open_pieces(context, speech_call(body, context.services))
    writer = SpeechWriter(file_format)
    if body.stream_format == "sse":
        await pieces.begin()
        return sse.response(sse.body(context.services.pools, pieces, writer.events))
    first = await _first_bytes(pieces, writer)
    return StreamingResponse(_rest(first, pieces, writer), media_type=audio.MEDIA_TYPES[file_format])


def speech_call(body: SpeechBody, services: Services) -> BackendCall:
    """The call. Raises ApiError naming the parameter."""
    if not body.input.strip():
        raise missing("input")
    request = GenerateRequest(
        operation="speech",
        input=body.input,
        speech=SpeechParams(
            services.voice_of(name_of(body.voice)), body.language, body.speed or 1.0, body.instructions or ""
        ),
        stages=body.stages or {},
        deadlines=body.deadlines or Deadlines(),
        priority=body.priority or 0,
    )
    return BackendCall(body.model, request, {})


class SpeechWriter:
    """Pieces of audio → the bytes of one file in its format."""

    def __init__(self, file_format: str) -> None:
        self._file_format = file_format
        self._encoder: audio.Encoder | None = None

    def encoded(self, piece: Piece) -> bytes:
        """Bytes that are ready after a piece; after the end, the rest."""
        data = b""
        if piece.audio is not None and piece.audio.size:
            if self._encoder is None:
                self._encoder = audio.encoder(self._file_format, piece.sample_rate_hz)
            data = self._encoder.feed(piece.audio)
        if piece.event.type == "end":
            if self._encoder is None:
                raise invalid("input", "There is nothing in 'input' that could be spoken.")
            data += self._encoder.finish()
        return data

    def events(self, run: int, piece: Piece) -> Iterable[bytes]:
        """The same as server-sent events."""
        if data := self.encoded(piece):
            delta = {"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()}
            yield sse.data(delta, "speech.audio.delta")
        if piece.event.type == "end":
            counts = usage_of(piece.event)
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "output_tokens": counts["completion_tokens"],
                "total_tokens": counts["total_tokens"],
            }
            yield sse.data({"type": "speech.audio.done", "usage": usage}, "speech.audio.done")


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
