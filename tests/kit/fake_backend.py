# SPDX-License-Identifier: Apache-2.0
"""A server's stand-in for the proxy: answers like the toy pipeline, and holds, fails and refuses on request.

It stands at the interface that AsyncClient has, so everything above the gRPC connection is the real thing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from triton_omni.backends import wire
from triton_omni.backends.core.generate import with_stage_options
from triton_omni.backends.core.outputs import (
    AudioPiece,
    ImagePiece,
    SegmentDecoding,
    TextPiece,
    TranscriptPiece,
    WordsPiece,
    WordTime,
)
from triton_omni.backends.core.pipeline import Stage
from triton_omni.backends.pipelines.toy import pipeline as toy
from triton_omni.backends.wire import Event, GenerateRequest
from triton_omni.connection import Model
from triton_omni.pieces import NO_MEDIA, Piece

RATE_HZ = 24_000
SAMPLES = 500  # per word: not a multiple of 3, so that framing of base64 shows
VOICES = (toy.VOICE,)
PAINTER = Stage("painter", toy.PIPELINE.stages[0].engine, params=("image", "transcription"))
FAKE = replace(toy.PIPELINE, name="fake", stages=(*toy.PIPELINE.stages, PAINTER))
"""Refuses what a real pipeline refuses: the toy that also draws and transcribes."""


@dataclass
class Seen:
    """One call as it arrived, and whether it ended by itself."""

    pipeline: str
    request: GenerateRequest
    media: Mapping[str, np.ndarray]
    request_id: str | None
    traceparent: str
    begun: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    completed: bool = False


@dataclass
class FakeBackend:
    """Behaviour is set from outside, before a call.

    hold_after  say nothing more after so many pieces
    fail_after  raise `error` after so many pieces
    reason      why answers end
    refusal     wire line of the error that every call gets at once
    missing     optional outputs that failed
    usage       more counts for the end event
    extra       tool calls and log-probabilities of every text piece
    """

    hold_after: int | None = None
    fail_after: int | None = None
    error: str = "[stage_failed:talker] out of luck"
    reason: str = "length"
    refusal: str = ""
    missing: dict[str, str] = field(default_factory=dict[str, str])
    usage: dict[str, float] = field(default_factory=dict[str, float])
    extra: TextPiece = field(default_factory=TextPiece)
    media: tuple[str, ...] = ("text", "audio", "image", "video")
    not_ready: dict[str, str] = field(default_factory=dict[str, str])
    degraded: bool = False
    unreachable: bool = False
    knows_operator: bool = True
    rate_hz: int = RATE_HZ
    operations: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    seen: list[Seen] = field(default_factory=list[Seen])
    feeds: dict[str, asyncio.Queue[tuple[str, bool]]] = field(
        default_factory=dict[str, "asyncio.Queue[tuple[str, bool]]"]
    )
    appended: list[str] = field(default_factory=list[str])
    called: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released by every call, after it is `seen`."""

    async def generate(
        self,
        pipeline: str,
        request: GenerateRequest,
        *,
        media: Mapping[str, np.ndarray] = NO_MEDIA,
        request_id: str | None = None,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> AsyncGenerator[Piece, None]:
        call = Seen(pipeline, request, media, request_id, traceparent)
        self.seen.append(call)
        self.called.release()
        try:
            self._refuse(request)
            if request.open_input:
                async with aclosing(self._streamed(call)) as pieces:  # `over` comes after all of it
                    async for piece in pieces:
                        yield piece
                call.completed = True
                return
            for count, piece in enumerate(self._pieces(request)):
                if count == self.fail_after:
                    raise wire.from_line(self.error)
                if count == self.hold_after:
                    call.begun.set()
                    await asyncio.Event().wait()
                call.begun.set()
                yield piece
                await asyncio.sleep(0)
            call.completed = True
        finally:
            call.over.set()

    async def append(self, pipeline: str, token: str, text: str, *, ends: bool = False) -> None:
        if token not in self.feeds:
            raise wire.from_line("[not_found:token] the request has ended, or there never was one with this token")
        self.appended.append(text)
        self.feeds[token].put_nowait((text, ends))

    async def _streamed(self, call: Seen) -> AsyncGenerator[Piece, None]:
        """A piece of audio for each word, as soon as it is complete."""
        token = f"token{len(self.seen)}"
        feed = self.feeds[token] = asyncio.Queue[tuple[str, bool]]()
        text, ends, samples, index = call.request.input, call.request.ends_input, 0, 0
        try:
            yield Piece(Event("accepted", token=token))
            while True:
                *words, text = text.split(" ")
                for word in [*words, *([text] if ends else [])]:
                    if index == self.fail_after:
                        raise wire.from_line(self.error)
                    if not word:
                        continue
                    for piece in self._spoken(call.request, word, index, samples):
                        yield piece
                    index, samples = index + 1, samples + SAMPLES
                    call.begun.set()
                if ends:
                    break
                more, ends = await feed.get()
                text += more
            yield Piece(Event("end", outcome="completed", usage={"prompt_tokens": 1.0}, missing=self.missing))
        finally:
            del self.feeds[token]

    def _spoken(self, request: GenerateRequest, text: str, index: int, samples: int) -> Iterator[Piece]:
        if WordsPiece.kind in request.modalities and not self.missing:
            word = WordTime(text, samples / self.rate_hz, (samples + SAMPLES // 2) / self.rate_hz)
            yield Piece(Event("words", output="words", index=index, piece=WordsPiece((word,))))
        audio = AudioPiece(self.rate_hz, SAMPLES)
        yield Piece(Event("audio", output="audio", index=index, piece=audio), audio=sine(samples, self.rate_hz))

    async def health(self, pipeline: str) -> dict[str, Any]:
        reason = self.not_ready.get(pipeline)
        if self.unreachable:
            raise wire.from_line("[unavailable] failed to connect")
        state = {"state": "ready" if reason is None else reason, "instances": 1, "live": 0}
        return {
            "pipeline": pipeline, "ready": reason is None,
            "state": "unavailable" if reason else "degraded" if self.degraded else "ready",
            "outputs": [] if reason else ["text"],
            "stages": {"words": state}, "live": 0, "queued": 0,
            "operations": self.operations.get(pipeline, ["chat", "completion", "speech"]),
            "about": {"voices": list(VOICES), "sample_rate": self.rate_hz, "media": list(self.media)},
        }  # fmt: skip

    async def requests(self, pipeline: str, request_id: str = "") -> dict[str, Any]:
        if not self.knows_operator:
            raise wire.from_line("[bad_request:triton_omni_key] listing requests needs the operator's key")
        live = [
            {"id": call.request_id, "phase": "answering", "stages": ["words"]}
            for call in self.seen
            if not call.over.is_set()
        ]
        over = [call for call in self.seen if call.over.is_set() and call.request_id == request_id]
        traces = [{"id": call.request_id, "total_s": 1.0, "spans": []} for call in over if call.pipeline == pipeline]
        return {**await self.health(pipeline), "requests": live, "traces": traces}

    async def models(self) -> list[Model]:
        if self.unreachable:
            raise wire.from_line("[unavailable] failed to connect")
        return [Model("fake", True), Model("painter", True)]

    async def close(self) -> None:
        """Nothing to close."""

    # ---
    def _refuse(self, request: GenerateRequest) -> None:
        if self.refusal:
            raise wire.from_line(self.refusal)
        FAKE.check_params(request)
        if request.operation in ("chat", "completion", "speech") and not request.stages:  # the toy has other stages
            toy.check(request)

    def _pieces(self, request: GenerateRequest) -> Iterator[Piece]:
        if request.operation in ("image", "edit") or "image" in request.modalities:
            yield from self._images(request)
            return
        if request.operation == "transcription":
            yield from self._segments(request.transcription.word_timestamps)
            return
        words = [word for word in request.input.split() if word.isascii()]  # words that cannot be spoken are left out
        total = len(words) if request.operation == "speech" else request.sampling.max_tokens or 3
        samples = 0
        for i in range(total):
            if request.operation in ("chat", "completion"):
                text = msgspec.structs.replace(self.extra, text=f"w{i} ")
                yield Piece(Event("text", output="text", index=i, piece=text), text.text)
            if request.operation == "speech" or "audio" in request.modalities:
                yield from self._spoken(request, words[i] if i < len(words) else "", i, samples)
                samples += SAMPLES
        usage = {"prompt_tokens": 5.0, "completion_tokens": float(total), **self.usage}
        end = Event("end", outcome="completed", finish_reason=self.reason, usage=usage, missing=self.missing)
        yield Piece(end)

    def _segments(self, with_words: bool) -> Iterator[Piece]:
        for i, text in enumerate(("Hello there.", " How are you?")):
            words = [
                WordTime(word, 1.5 * i + 0.25 * k, 1.5 * i + 0.25 * (k + 1))
                for k, word in enumerate(text.split() if with_words else ())
            ]
            decoding = SegmentDecoding(50 * i, (7, 8 + i), 0.0, -0.25, 0.75, 0.125)
            segment = TranscriptPiece(text, 1.5 * i, 1.5 * i + 1.25, "english", tuple(words), decoding=decoding)
            yield Piece(Event("transcript", output="transcript", index=i, piece=segment), text)
        yield Piece(Event("end", outcome="completed", usage={"audio_input_s": 2.75}))

    def _images(self, request: GenerateRequest) -> Iterator[Piece]:
        params = with_stage_options(request.image, request.stages.get("denoiser", {}), "denoiser")
        usage = {"prompt_tokens": 4.0, "completion_tokens": 8.0, **self.usage}
        shape = (params.height or 8, params.width or 16, 3)
        every = params.preview_every
        previews = len(range(every, params.steps or 4, every)) if every else params.partial_images
        for i in range(previews):
            preview = ImagePiece(partial=True, partial_image_index=i)
            yield Piece(Event("image", output="image", piece=preview), image=np.full(shape, i, np.uint8))
        for i in range(params.n):
            event = Event("image", output="image", piece=ImagePiece(index=i, seed=7))
            yield Piece(event, image=np.full(shape, 200 + i, np.uint8))
        yield Piece(Event("end", outcome="completed", usage=usage))


def sine(start: int, rate_hz: int = RATE_HZ) -> np.ndarray:
    """SAMPLES samples of a tone, as if it had begun `start` samples ago."""
    n = np.arange(start, start + SAMPLES, dtype=np.float64)
    return (0.5 * np.sin(2 * np.pi * 440.0 / rate_hz * n)).astype(np.float32)
