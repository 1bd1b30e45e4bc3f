# SPDX-License-Identifier: Apache-2.0
"""`triton-omni chat`, `speak`, `transcribe`, `draw` and `edit`: ask a server, show and save what comes as it comes."""

from __future__ import annotations

import argparse
import json
import wave
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec
import numpy as np

from triton_omni.backends.wire import (
    Event,
    GenerateRequest,
    ImageParams,
    ImagePiece,
    Message,
    Part,
    Sampling,
    SpeechParams,
    TranscriptionParams,
    TranscriptPiece,
)
from triton_omni.data_urls import is_data_url
from triton_omni.media import Media
from triton_omni.pieces import Piece
from triton_omni.subtitles import Phrase, srt, vtt
from triton_omni.sync import Client

Show = Callable[[str], None]


class WavFile:
    """16-bit mono speech, written while it arrives. The file is created with the first samples."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sink: BinaryIO | None = None
        self._file: wave.Wave_write | None = None
        self.seconds = 0.0

    def add(self, samples: np.ndarray, rate_hz: int) -> None:
        """Append samples, (samples,) float32."""
        if self._file is None:
            self._sink = self._path.open("wb")
            self._file = wave.open(self._sink, "wb")  # noqa: SIM115 as above
            self._file.setnchannels(1)
            self._file.setsampwidth(2)
            self._file.setframerate(rate_hz)
        self._file.writeframes(np.rint(samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
        self.seconds += len(samples) / rate_hz

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._sink is not None:
            self._sink.close()


def chat(client: Client, options: argparse.Namespace, show: Show) -> int:
    """Ask one question, or chat line by line."""
    history = [Message("system", options.system)] if options.system else []
    media = Media()
    parts = [
        add(_content(client, source))
        for sources, add in ((options.image, media.image), (options.audio, media.audio), (options.video, media.video))
        for source in sources
    ]
    for prompt in [options.prompt] if options.prompt else _prompts():
        history.append(Message("user", (*parts, Part("text", prompt)) if parts else prompt))
        parts = []
        answer = _answer(client, options, tuple(history), media, show)
        history.append(Message("assistant", answer))
    show("\n")
    return 0


def _content(client: Client, source: str) -> bytes:
    """The bytes of a file or URL. Raises OSError or MediaError."""
    is_url = "://" in source or is_data_url(source)
    return client.read_url(source) if is_url else Path(source).read_bytes()


def _prompts() -> Iterator[str]:
    """Lines typed by the user until Ctrl-D."""
    while True:
        try:
            line = input("you: ").strip()
        except EOFError:
            return
        if line:
            yield line


def _answer(
    client: Client, options: argparse.Namespace, messages: tuple[Message, ...], media: Media, show: Show
) -> str:
    request = GenerateRequest(
        messages=messages,
        modalities=("text", "audio") if options.speak else ("text",),
        speech=SpeechParams(options.voice),
        sampling=Sampling(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed),
    )
    text: list[str] = []
    end = Event("end")
    pieces = _pieces(client, options.model, request, media)
    with closing(pieces), WavFile(options.speak or Path()) as wav:
        for piece in pieces:
            if piece.text is not None:
                show(piece.text)
                text.append(piece.text)
            if piece.audio is not None:
                wav.add(piece.audio, piece.sample_rate_hz)
            end = piece.event
    show(f"\n[{_facts(end, wav.seconds, options.speak)}]\n")
    return "".join(text)


def speak(client: Client, options: argparse.Namespace, show: Show) -> int:
    """Speak a text into a WAV file."""
    request = GenerateRequest(
        operation="speech", input=options.text, speech=SpeechParams(options.voice, speed=options.speed)
    )
    end = Event("end")
    with closing(_pieces(client, options.model, request, Media())) as pieces, WavFile(options.out) as wav:
        for piece in pieces:
            if piece.audio is not None:
                wav.add(piece.audio, piece.sample_rate_hz)
            end = piece.event
    show(f"{_facts(end, wav.seconds, options.out)}\n")
    return 0


def transcribe(client: Client, options: argparse.Namespace, show: Show) -> int:
    """Transcribe a file: text while it arrives, other formats at the end."""
    media = Media()
    part = media.audio(_content(client, options.source))
    request = GenerateRequest(
        operation="transcription",
        messages=(Message("user", (part,)),),
        transcription=TranscriptionParams(word_timestamps=options.words),
    )
    phrases: list[Phrase] = []
    segments: list[dict[str, object]] = []
    with closing(_pieces(client, options.model, request, media)) as pieces:
        for piece in pieces:
            segment = piece.event.piece
            if not isinstance(segment, TranscriptPiece):
                continue
            phrases.append(Phrase(segment.start_s, segment.end_s, segment.text))
            segments.append(_segment_json(segment))
            if options.format == "text":
                show(segment.text)
    whole = {"text": "".join(phrase.text for phrase in phrases), "segments": segments}
    rest = {
        "text": "\n",
        "srt": srt(phrases),
        "vtt": vtt(phrases),
        "json": json.dumps(whole, ensure_ascii=False) + "\n",
    }
    show(rest[options.format])
    return 0


def _segment_json(segment: TranscriptPiece) -> dict[str, object]:
    times = {"start_s": segment.start_s, "end_s": segment.end_s, "language": segment.language}
    words = {"words": [msgspec.to_builtins(word) for word in segment.words]} if segment.words else {}
    return {"text": segment.text, **times, **words}


def draw(client: Client, options: argparse.Namespace, show: Show) -> int:
    """Generate an image."""
    return _image(client, options, GenerateRequest(operation="image", input=options.prompt), Media(), show)


def edit(client: Client, options: argparse.Namespace, show: Show) -> int:
    """Edit an image."""
    media = Media()
    parts = [media.image(_content(client, options.image), alpha="drop")]
    if options.mask:
        parts.append(media.mask(_content(client, options.mask)))
    message = Message("user", (*parts, Part("text", options.prompt)))
    return _image(client, options, GenerateRequest(operation="edit", messages=(message,)), media, show)


def _image(client: Client, options: argparse.Namespace, request: GenerateRequest, media: Media, show: Show) -> int:
    from PIL import Image

    width, height = options.size or (None, None)
    params = ImageParams(width, height, options.steps, seed=options.seed)
    request = msgspec.structs.replace(request, image=params)
    with closing(_pieces(client, options.model, request, media)) as pieces:
        for piece in pieces:
            progress, about = piece.event.progress, piece.event.piece
            if progress is not None:
                show(f"\rstep {progress.done:g} of {progress.total:g} ")
            elif piece.image is not None and isinstance(about, ImagePiece):
                Image.fromarray(piece.image).save(options.out)
                height, width = piece.image.shape[:2]
                show(f"\r{options.out}: {width}x{height}, seed {about.seed}\n")
    return 0


def _pieces(client: Client, model: str, request: GenerateRequest, media: Media) -> Generator[Piece]:
    """Pieces as a generator, so that leaving early (Ctrl-C) ends the request."""

    def generate() -> Generator[Piece]:
        yield from client.generate(model, request, media=media.tensors)

    return generate()


def _facts(end: Event, seconds: float, path: Path | None) -> str:
    timings = end.timings
    facts = [f"{name}: {timings[key]:.2f} s" for name, key in _TIMES if key in timings]
    facts += [f"tokens: {int(end.usage['completion_tokens'])}"] if "completion_tokens" in end.usage else []
    facts += [f"{seconds:.1f} s of speech in {path}"] if seconds else []
    return ", ".join([end.finish_reason, *facts])


_TIMES = (("first text", "first_text_s"), ("first audio", "first_audio_s"), ("total", "total_s"))
