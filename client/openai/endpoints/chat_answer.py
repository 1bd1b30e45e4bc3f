# SPDX-License-Identifier: Apache-2.0
"""Output pieces → OpenAI's chat completion, at once or as chunks. Pure state machines, no I/O."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from triton_omni.backends.wire import Candidate, Event, TextPiece, TokenLogprob
from triton_omni.openai.endpoints.chat_request import ChatCall
from triton_omni.openai.endpoints.image_request import as_base64
from triton_omni.openai.endpoints.schemas import Json
from triton_omni.openai.http.transcripts import Transcripts
from triton_omni.openai.media import audio
from triton_omni.openai.media.audio import PCM_HZ
from triton_omni.pieces import Piece

PCM_STEP = 6
"""Bytes. Clients join base64 strings, so all but the last must encode a multiple of 3 bytes, and of a sample."""


@dataclass(frozen=True)
class Head:
    """What is equal in every chunk of one answer."""

    id: str
    created: int
    model: str


def usage_of(*ends: Event, prompts: int = 1) -> Json:
    """OpenAI's token counts from the end events of all runs. Audio tokens are codec frames.

    prompts  different prompts of these runs, each with as many runs as the others
    """
    counts = [{name: int(value) for name, value in end.usage.items()} for end in ends]
    text = sum(count.get("completion_tokens", 0) for count in counts)
    audio_tokens = sum(count.get("audio_tokens", count.get("audio_frames", 0)) for count in counts)
    firsts = counts[:: len(counts) // prompts]  # of the runs of one prompt each has read it
    prompt = sum(count.get("prompt_tokens", 0) for count in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": text + audio_tokens,
        "total_tokens": prompt + text + audio_tokens,
        "prompt_tokens_details": {
            "audio_tokens": sum(count.get("prompt_audio_tokens", 0) for count in firsts),
            "cached_tokens": sum(count.get("cached_tokens", 0) for count in firsts),
        },
        "completion_tokens_details": {
            "text_tokens": text,
            "audio_tokens": audio_tokens,
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def logprobs_of(event: Event, top: int) -> list[Json]:
    """OpenAI's log-probabilities of the tokens of one piece of text."""

    def entry(token: TokenLogprob | Candidate) -> Json:
        return {"token": token.token, "logprob": token.logprob, "bytes": list(token.token.encode("utf-8"))}

    tokens = event.piece.logprobs if isinstance(event.piece, TextPiece) else ()
    return [entry(token) | {"top_logprobs": [entry(other) for other in token.top[:top]]} for token in tokens]


def finish_reason_of(event: Event) -> str:
    """OpenAI's finish reason."""
    return event.finish_reason or "stop"


def tool_calls_of(event: Event) -> list[Json]:
    """Function calls of an event; each arrives once and complete."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in (event.piece.tool_calls if isinstance(event.piece, TextPiece) else ())
    ]


def image_part(pixels: np.ndarray, index: int) -> Json:
    """An image as an entry of OpenRouter's `images`; `index` lets SDKs join the deltas of a stream."""
    return {
        "type": "image_url", "index": index, "image_url": {"url": f"data:image/png;base64,{as_base64(pixels)}"},
    }  # fmt: skip


class ChoiceStream:
    """The chunks' choices of one run, in OpenAI's order:

    role; audio id; transcript and data, or text, or calls, or images, as they arrive; expires_at; finish reason.
    """

    def __init__(self, call: ChatCall, index: int, transcripts: Transcripts) -> None:
        self.end: Event | None = None
        self._call = call
        self._index = index
        self._transcripts = transcripts
        self._has_audio = call.audio_format is not None
        self._audio_id = transcripts.new_id() if self._has_audio else ""
        self._transcript: list[str] = []
        self._encoder: audio.Encoder | None = None
        self._held = b""
        self._images = 0
        self._tool_calls = 0

    def start(self) -> Iterable[Json]:
        """Choices before any piece."""
        yield self._choice({"role": "assistant", "content": "", "refusal": None})
        if self._has_audio:
            yield self._choice({"audio": {"id": self._audio_id, "transcript": ""}})

    def on(self, piece: Piece) -> Iterable[Json]:
        """Choices for a piece."""
        if piece.event.type == "text" and piece.text is not None:
            calls = list(self._new_calls(piece.event))
            if piece.text or logprobs_of(piece.event, 0):
                yield self._text(piece.text, piece.event)
            if calls:
                yield self._choice({"tool_calls": calls})
        if piece.audio is not None:
            yield from self._audio(piece.audio, piece.sample_rate_hz)
        if piece.image is not None and not piece.is_preview:
            yield self._choice({"images": [image_part(piece.image, self._images)]})
            self._images += 1
        if piece.event.type == "end":
            yield from self._end(piece.event)

    def _new_calls(self, event: Event) -> Iterable[Json]:
        for call in tool_calls_of(event):
            if not (self._call.one_call and self._tool_calls):
                yield {"index": self._tool_calls, **call}
                self._tool_calls += 1

    def _text(self, text: str, event: Event) -> Json:
        logprobs = None
        if self._call.top_logprobs is not None:
            logprobs = {"content": logprobs_of(event, self._call.top_logprobs), "refusal": None}
        if not self._has_audio:
            return self._choice({"content": text}, logprobs=logprobs)
        self._transcript.append(text)
        return self._choice({"audio": {"transcript": text}}, logprobs=logprobs)

    def _audio(self, samples: np.ndarray, rate_hz: int) -> Iterable[Json]:
        if self._encoder is None:
            self._encoder = audio.encoder("pcm16", rate_hz)
        self._held += self._encoder.feed(samples)
        whole = len(self._held) // PCM_STEP * PCM_STEP
        data, self._held = self._held[:whole], self._held[whole:]
        return self._data(data)

    def _data(self, data: bytes) -> Iterable[Json]:
        return [self._choice({"audio": {"data": base64.b64encode(data).decode()}})] if data else []

    def _end(self, event: Event) -> Iterable[Json]:
        self.end = event
        if self._encoder is not None:
            yield from self._data(self._held + self._encoder.finish())
        if self._has_audio:
            expires_at = self._transcripts.keep(self._audio_id, "".join(self._transcript))
            yield self._choice({"audio": {"expires_at": expires_at}})
        yield self._choice({}, finish_reason=finish_reason_of(event))

    def _choice(self, delta: Json, *, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class ChunkStream:
    """The chunks of one streamed answer: its choices as they arrive, and at the end the usage of all."""

    def __init__(self, call: ChatCall, head: Head, transcripts: Transcripts) -> None:
        self._with_usage = call.with_usage
        self._head = head
        self._choices = [ChoiceStream(call, index, transcripts) for index in range(call.call.runs)]

    def start(self) -> Iterable[Json]:
        """The chunks before any piece."""
        return [self._chunk([entry], None) for choice in self._choices for entry in choice.start()]

    def on(self, run: int, piece: Piece) -> Iterable[Json]:
        """The chunks for a piece."""
        chunks = [self._chunk([entry], None) for entry in self._choices[run].on(piece)]
        ends = [choice.end for choice in self._choices if choice.end is not None]
        if self._with_usage and piece.event.type == "end" and len(ends) == len(self._choices):
            chunks.append(self._chunk([], usage_of(*ends)))
        return chunks

    def _chunk(self, choices: list[Json], usage: Json | None) -> Json:
        head = self._head
        chunk: Json = {
            "id": head.id, "object": "chat.completion.chunk", "created": head.created, "model": head.model,
            "system_fingerprint": None, "choices": choices,
        }  # fmt: skip
        return chunk | {"usage": usage} if self._with_usage else chunk


@dataclass
class ChoiceParts:
    """The output of one run so far, for an answer that is sent at once."""

    text: list[str] = field(default_factory=list[str])
    audio: list[np.ndarray] = field(default_factory=list[np.ndarray])
    images: list[np.ndarray] = field(default_factory=list[np.ndarray])
    logprobs: list[Json] = field(default_factory=list[Json])
    tool_calls: list[Json] = field(default_factory=list[Json])
    rate_hz: int = PCM_HZ
    end: Event = field(default_factory=lambda: Event("end"))


class ChatCompletion:
    """An answer that is sent at once: collects the pieces, then builds the completion."""

    def __init__(self, call: ChatCall) -> None:
        self._call = call
        self._runs = [ChoiceParts() for _ in range(call.call.runs)]

    def on(self, index: int, piece: Piece) -> None:
        """Take a piece of one run."""
        run = self._runs[index]
        if piece.event.type == "end":
            run.end = piece.event
        if piece.text is not None and piece.event.type == "text":
            run.text.append(piece.text)
            run.tool_calls += tool_calls_of(piece.event)
            if self._call.top_logprobs is not None:
                run.logprobs += logprobs_of(piece.event, self._call.top_logprobs)
        if piece.audio is not None:
            run.audio.append(piece.audio)
            run.rate_hz = piece.sample_rate_hz
        if piece.image is not None and not piece.is_preview:
            run.images.append(piece.image)

    def body(self, head: Head, transcripts: Transcripts) -> Json:
        """The response body; encodes audio and images."""
        choices = [
            {
                "index": index,
                "message": self._message(run, transcripts),
                "logprobs": None if self._call.top_logprobs is None else {"content": run.logprobs, "refusal": None},
                "finish_reason": finish_reason_of(run.end),
            }
            for index, run in enumerate(self._runs)
        ]
        return {
            "id": head.id, "object": "chat.completion", "created": head.created, "model": head.model,
            "choices": choices, "usage": usage_of(*(run.end for run in self._runs)), "system_fingerprint": None,
        }  # fmt: skip

    def _message(self, run: ChoiceParts, transcripts: Transcripts) -> Json:
        text = "".join(run.text)
        is_silent = not text and bool(run.images or run.tool_calls)
        message: Json = {
            "role": "assistant",
            "content": None if is_silent else text,
            "refusal": None,
            "annotations": [],
        }
        if self._call.audio_format is not None and not is_silent:
            message |= {"content": None, "audio": _audio_message(self._call.audio_format, run, text, transcripts)}
        if run.tool_calls:
            message["tool_calls"] = run.tool_calls[: 1 if self._call.one_call else None]
        if run.images:
            message["images"] = [image_part(pixels, index) for index, pixels in enumerate(run.images)]
        return message


def _audio_message(file_format: str, run: ChoiceParts, transcript: str, transcripts: Transcripts) -> Json:
    audio_id = transcripts.new_id()
    return {
        "id": audio_id,
        "data": base64.b64encode(audio.encode(file_format, run.rate_hz, run.audio)).decode(),
        "expires_at": transcripts.keep(audio_id, transcript),
        "transcript": transcript,
    }
