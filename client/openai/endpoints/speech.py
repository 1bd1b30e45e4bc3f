# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/speech: a text straight to the speech stages, the sound back as it is made."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from triton_omni.backends.wire import GenerateRequest
from triton_omni.openai.endpoints import extras
from triton_omni.openai.endpoints.chat_answer import usage_of
from triton_omni.openai.endpoints.chat_request import voice_of
from triton_omni.openai.http import sse
from triton_omni.openai.http.bodies import read_json
from triton_omni.openai.http.calls import BrokenOff, Call, Pieces, open_pieces, shared_of
from triton_omni.openai.http.errors import ApiError, invalid, missing
from triton_omni.openai.http.fields import IGNORED, Fields
from triton_omni.openai.media import audio
from triton_omni.pieces import Piece

MAX_INPUT_CHARS = 4096
FORMATS = tuple(k for k in audio.MEDIA_TYPES if k != "pcm16")


async def speak(request: Request) -> Response:
    """Speak a text."""
    call, kind, is_sse = read_speech(await read_json(request))
    pieces = await open_pieces(request, call)
    voice = Voice(kind)
    if is_sse:
        await pieces.begin()
        return sse.response(sse.body(shared_of(request).pools, pieces, voice.events))
    first = await _first_bytes(pieces, voice)
    return StreamingResponse(_rest(first, pieces, voice), media_type=audio.MEDIA_TYPES[kind])


def read_speech(fields: Fields) -> tuple[Call, str, bool]:
    """(call, format, as events?). Raises ApiError naming the parameter."""
    model = fields.text("model", needed=True) or ""
    text = fields.text("input", needed=True, most=MAX_INPUT_CHARS) or ""
    if not text.strip():
        raise missing("input")
    voice = voice_of(fields)
    kind = fields.choice("response_format", FORMATS, "mp3") or "mp3"
    stream_format = fields.choice("stream_format", ("audio", "sse"), "audio")
    instructions = fields.text("instructions", most=MAX_INPUT_CHARS) or ""
    params = extras.speech(fields, voice, instructions)
    options = extras.request(fields)
    fields.nothing_else(IGNORED)
    request = GenerateRequest(operation="speech", input=text, speech=params, **options)
    return Call(model, request, {}), kind, stream_format == "sse"


class Voice:
    """Pieces of speech → bytes of one file in its format."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._encoder: audio.Encoder | None = None

    def sound(self, piece: Piece) -> bytes:
        """Bytes that are ready after a piece; at the end the rest."""
        made = b""
        if piece.audio is not None and piece.audio.size:
            if self._encoder is None:
                self._encoder = audio.encoder(self._kind, int(piece.event.meta["sample_rate"]))
            made = self._encoder.feed(piece.audio)
        if piece.event.type == "end":
            if self._encoder is None:
                raise invalid("input", "There is nothing in 'input' that could be spoken.")
            made += self._encoder.finish()
        return made

    def events(self, run: int, piece: Piece) -> Iterable[bytes]:
        """The same as server-sent events."""
        if sound := self.sound(piece):
            delta = {"type": "speech.audio.delta", "audio": base64.b64encode(sound).decode()}
            yield sse.data(delta, "speech.audio.delta")
        if piece.event.type == "end":
            counts = usage_of(piece.event)
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "output_tokens": counts["completion_tokens"],
                "total_tokens": counts["total_tokens"],
            }
            yield sse.data({"type": "speech.audio.done", "usage": usage}, "speech.audio.done")


async def _first_bytes(pieces: Pieces, voice: Voice) -> bytes:
    """The first sound: until then an error can still be an answer with its own status."""
    async for _, piece in pieces:
        if sound := voice.sound(piece):
            return sound
    return b""


async def _rest(first: bytes, pieces: Pieces, voice: Voice) -> AsyncIterator[bytes]:
    """All bytes. An error here breaks the transfer off: a file that ends early must not look complete."""
    yield first
    try:
        async for _, piece in pieces:
            if sound := voice.sound(piece):
                yield sound
    except ApiError as error:
        raise BrokenOff(error.message) from error
