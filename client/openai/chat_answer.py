# SPDX-License-Identifier: Apache-2.0
"""Pieces of an answer → OpenAI's chat completion, at once or as chunks. Pure state machines, no I/O."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.wire import Event
from client.openai import audio
from client.openai.chat_request import ChatCall
from client.openai.transcripts import Transcripts
from client.pieces import Piece

Json = dict[str, Any]
PCM_STEP = 6
"""Bytes. Clients join base64 texts, so all but the last must stand for a multiple of 3 bytes, and of a sample."""


@dataclass(frozen=True)
class Head:
    """What is the same in every chunk of one answer."""

    id: str
    created: int
    model: str


def usage_of(event: Event) -> Json:
    """OpenAI's token counts from those of the end event. Tokens of speech are its codec frames."""
    counts = {name: int(value) for name, value in event.usage.items()}
    text = counts.get("completion_tokens", 0)
    spoken = counts.get("audio_tokens", counts.get("audio_frames", 0))
    prompt = counts.get("prompt_tokens", 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": text + spoken,
        "total_tokens": prompt + text + spoken,
        "prompt_tokens_details": {
            "audio_tokens": counts.get("prompt_audio_tokens", 0),
            "cached_tokens": counts.get("cached_tokens", 0),
        },
        "completion_tokens_details": {
            "text_tokens": text,
            "audio_tokens": spoken,
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def logprobs_of(event: Event, top: int) -> list[Json]:
    """OpenAI's log-probabilities of the tokens of one piece of text."""

    def entry(token: Mapping[str, Any]) -> Json:
        return {
            "token": token["token"], "logprob": token["logprob"], "bytes": list(str(token["token"]).encode("utf-8")),
        }  # fmt: skip

    return [
        entry(token) | {"top_logprobs": [entry(other) for other in token.get("top", [])[:top]]}
        for token in event.meta.get("logprobs", [])
    ]


def finish_reason_of(event: Event) -> str:
    """OpenAI's word for why the answer ended."""
    return event.finish_reason or "stop"


class Chunks:
    """The chunks of one streamed answer, in OpenAI's order:

    role; audio id; transcript and data as they come; expires_at; finish reason; usage.
    """

    def __init__(self, call: ChatCall, head: Head, transcripts: Transcripts) -> None:
        self._call = call
        self._head = head
        self._transcripts = transcripts
        self._is_spoken = call.audio_format is not None
        self._audio_id = transcripts.new_id() if self._is_spoken else ""
        self._transcript: list[str] = []
        self._encoder: audio.Encoder | None = None
        self._held = b""

    def start(self) -> list[Json]:
        """The chunks before any piece."""
        chunks = [self._chunk({"role": "assistant", "content": "", "refusal": None})]
        if self._is_spoken:
            chunks.append(self._audio_chunk({"id": self._audio_id, "transcript": ""}))
        return chunks

    def on(self, piece: Piece) -> list[Json]:
        """The chunks for a piece."""
        if piece.event.type == "end":
            return self._end(piece.event)
        chunks: list[Json] = []
        if piece.text is not None and piece.event.type == "text":
            chunks += self._text(piece.text, piece.event)
        if piece.audio is not None:
            chunks += self._speech(piece.audio, piece.event)
        return chunks

    def _text(self, text: str, event: Event) -> list[Json]:
        logprobs = None
        if self._call.top_logprobs is not None:
            logprobs = {"content": logprobs_of(event, self._call.top_logprobs), "refusal": None}
        if not self._is_spoken:
            return [self._chunk({"content": text}, logprobs=logprobs)]
        self._transcript.append(text)
        return [self._audio_chunk({"transcript": text}, logprobs)]

    def _speech(self, samples: np.ndarray, event: Event) -> list[Json]:
        if self._encoder is None:
            self._encoder = audio.encoder("pcm16", int(event.meta["sample_rate"]))
        self._held += self._encoder.feed(samples)
        whole = len(self._held) // PCM_STEP * PCM_STEP
        data, self._held = self._held[:whole], self._held[whole:]
        return self._data(data)

    def _data(self, data: bytes) -> list[Json]:
        return [self._audio_chunk({"data": base64.b64encode(data).decode()})] if data else []

    def _end(self, event: Event) -> list[Json]:
        chunks: list[Json] = []
        if self._encoder is not None:
            chunks += self._data(self._held + self._encoder.finish())
        if self._is_spoken:
            expires_at = self._transcripts.keep(self._audio_id, "".join(self._transcript))
            chunks.append(self._audio_chunk({"expires_at": expires_at}))
        chunks.append(self._chunk({}, finish_reason=finish_reason_of(event)))
        if self._call.with_usage:
            chunks.append(self._frame([], usage_of(event)))
        return chunks

    def _audio_chunk(self, value: Json, logprobs: Json | None = None) -> Json:
        return self._chunk({"audio": value}, logprobs=logprobs)

    def _chunk(self, delta: Json, *, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._frame([choice], None)

    def _frame(self, choices: list[Json], usage: Json | None) -> Json:
        head = self._head
        chunk: Json = {
            "id": head.id, "object": "chat.completion.chunk", "created": head.created, "model": head.model,
            "system_fingerprint": None, "choices": choices,
        }  # fmt: skip
        return chunk | {"usage": usage} if self._call.with_usage else chunk


@dataclass
class Whole:
    """An answer that is sent at once: collects the pieces, then builds the completion."""

    call: ChatCall
    text: list[str] = field(default_factory=list[str])
    speech: list[np.ndarray] = field(default_factory=list[np.ndarray])
    logprobs: list[Json] = field(default_factory=list[Json])
    rate_hz: int = audio.PCM_HZ
    end: Event = field(default_factory=lambda: Event("end"))

    def on(self, piece: Piece) -> None:
        """Take a piece."""
        if piece.event.type == "end":
            self.end = piece.event
        if piece.text is not None and piece.event.type == "text":
            self.text.append(piece.text)
            if self.call.top_logprobs is not None:
                self.logprobs += logprobs_of(piece.event, self.call.top_logprobs)
        if piece.audio is not None:
            self.speech.append(piece.audio)
            self.rate_hz = int(piece.event.meta["sample_rate"])

    def completion(self, head: Head, transcripts: Transcripts) -> Json:
        """The chat completion; encodes the speech."""
        text = "".join(self.text)
        message: Json = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if self.call.audio_format is not None:
            message |= {"content": None, "audio": self._audio(self.call.audio_format, text, transcripts)}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None if self.call.top_logprobs is None else {"content": self.logprobs, "refusal": None},
            "finish_reason": finish_reason_of(self.end),
        }
        return {
            "id": head.id, "object": "chat.completion", "created": head.created, "model": head.model,
            "choices": [choice], "usage": usage_of(self.end), "system_fingerprint": None,
        }  # fmt: skip

    def _audio(self, kind: str, transcript: str, transcripts: Transcripts) -> Json:
        audio_id = transcripts.new_id()
        return {
            "id": audio_id,
            "data": base64.b64encode(audio.encode(kind, self.rate_hz, self.speech)).decode(),
            "expires_at": transcripts.keep(audio_id, transcript),
            "transcript": transcript,
        }
