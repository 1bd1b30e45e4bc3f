# SPDX-License-Identifier: Apache-2.0
"""The codec engine: codes to audio in chunks, all runs that have enough frames in one pass.

A run's first chunk is small, so that audio starts early; later ones are larger, which costs less per second of audio.
A ramp between them keeps each chunk shorter than what has been said before it comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Annotated, Any

import msgspec
import numpy as np

from triton_omni.backends.codec.decoder import Decoder, Window
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import EngineChunk, EngineEvent, EngineFinished, EngineOutput, Run
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.generate import stage_options
from triton_omni.backends.core.outputs import AudioPiece, WordsPiece, WordTime

Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class CodecOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How codes are cut into chunks.

    first_chunk_frames  frames of a run's first chunk
    ramp_frames         frames of the chunks between the first one and the later ones: [8, 16] lets them grow in steps
    chunk_frames        frames of all later ones
    max_batch           runs decoded in one step
    max_queued_frames   a run with this many frames waiting takes no more for now
    """

    first_chunk_frames: Count = 10
    ramp_frames: tuple[Count, ...] = ()
    chunk_frames: Count = 25
    max_batch: Count = 32
    max_queued_frames: Annotated[int, msgspec.Meta(ge=1)] = 1600

    def __post_init__(self) -> None:
        steps = (self.first_chunk_frames, *self.ramp_frames, self.chunk_frames)
        if self.ramp_frames and list(steps) != sorted(set(steps)):
            raise ValueError("ramp_frames must grow from first_chunk_frames to chunk_frames")


CHUNKS = ("first_chunk_frames", "chunk_frames")


class RunOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request may say for itself (`stages.<stage>`); None is the deployment's value. Of the deployment's ramp
    a run takes the steps that lie between its own first and later chunks."""

    first_chunk_frames: Count | None = None
    chunk_frames: Count | None = None


@dataclass(eq=False, slots=True)
class DecodeRunState:
    """State of one run. `codes` are the frames from number `start` on: context that is decoded, then what is not.

    `sizes` are the frames of the chunks after the next one, without end.
    """

    sizes: Iterator[int]
    next_frames: int
    state: Any
    codes: np.ndarray
    context: int = 0
    """Frames at the front that the audio goes on from: they are decoded, and their audio is not sent."""
    unsent: int = 0
    """Frames of the context that are not decoded."""
    start: int = 0
    decoded: int = 0
    ended: bool = False
    arrived: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """Frames since the last window, not joined to `codes` yet."""
    waiting: int = 0
    """Frames that are not decoded."""
    words: list[WordTime] = field(default_factory=list[WordTime])
    """Words of the speech whose audio is not decoded yet, in their order."""

    def words_before(self, end_s: float) -> WordsPiece:
        """The words that begin before this second of the audio; they are not kept."""
        due = tuple(word for word in self.words if word.start_s < end_s)
        del self.words[: len(due)]
        return WordsPiece(due)


class CodecEngine:
    """core.engine.Engine over a Decoder."""

    def __init__(self, stage: str, decoder: Decoder, options: CodecOptions) -> None:
        self.stage = stage
        self.decoder = decoder
        self.options = options
        self._runs: list[Run] = []
        # a larger chunk would never be complete: its run takes no more frames before
        self._largest = options.max_queued_frames - decoder.right
        longest = max(options.first_chunk_frames, options.chunk_frames)
        if longest > self._largest:
            raise ValueError(f"max_queued_frames must be at least {longest + decoder.right} for these chunks")

    def open(self, run: Run) -> None:
        own = stage_options(run.options(self.stage), RunOptions, self.stage)
        for key in CHUNKS:
            frames = getattr(own, key)
            if frames is not None and frames > self._largest:
                message = f"a chunk must be at most {self._largest} frames in this deployment (got {frames})"
                raise BadRequest(message, f"stages.{self.stage}.{key}")
        first = own.first_chunk_frames or self.options.first_chunk_frames
        later = own.chunk_frames or self.options.chunk_frames
        ramp = [frames for frames in self.options.ramp_frames if first < frames < later]
        run.state = DecodeRunState(
            sizes=chain(ramp, repeat(later)),
            next_frames=first,
            state=self.decoder.start(),
            codes=np.zeros((0, self.decoder.codes), np.int16),
        )
        self._runs.append(run)

    def feed(self, run: Run, inputs: Chunk, last: bool) -> bool:
        """Take the chunk's tensor `codes`, and the words that a `WordsPiece` says are in them; an empty chunk has none.
        A first chunk may bring `context`: codes that the audio goes on from.

        Words of an empty chunk, or later than its codes, are sent with the audio at their time.
        """
        state: DecodeRunState = run.state
        if state.waiting >= self.options.max_queued_frames:
            return False
        tensor, context = inputs.tensor("codes"), inputs.tensor("context")
        if context is not None:
            if state.waiting or state.decoded:
                raise StageFailed("'context' came behind other frames", f"{inputs.edge}->{self.stage}")
            self._take(state, context)
            state.context = state.unsent = state.waiting
        if tensor is not None:
            self._take(state, tensor)
        elif context is None and not inputs.is_empty:
            raise StageFailed("the chunk has no 'codes'", f"{inputs.edge}->{self.stage}")
        if isinstance(inputs.piece, WordsPiece):
            state.words += inputs.piece.words
        state.ended = last
        return True

    def stop(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)

    @property
    def has_work(self) -> bool:
        return any(self._can_work(run) for run in self._runs)

    def step(self) -> Sequence[EngineEvent]:
        runs = [run for run in self._runs if self._can_work(run)][: self.options.max_batch]
        decoding = [run for run in runs if run.state.waiting]
        windows = [self._window(run.state) for run in decoding]
        events: list[EngineEvent] = []
        for run, window, audio in zip(decoding, windows, self.decoder.decode(windows) if windows else (), strict=True):
            if window.start + window.left < run.state.context:
                continue
            if run.state.words and (words := run.state.words_before(self._decoded_s(run.state))).words:
                events.append(EngineOutput(run, words))
            piece, tensors = AudioPiece(self.decoder.sample_rate_hz, len(audio)), (Tensor.of("audio", audio),)
            events.append(EngineOutput(run, piece, tensors))
            if run.feeds:
                events.append(EngineChunk(run, tensors))
        for run in runs:
            self._runs.remove(run)
            state: DecodeRunState = run.state
            if state.ended and not state.waiting:
                events.append(EngineFinished(run, "stop", {"audio_samples": self._samples(state)}))
            else:
                self._runs.append(run)  # the end of the queue: with more runs than a batch holds, all take turns
        return events

    def close(self) -> None:
        self._runs.clear()

    def _decoded_s(self, state: DecodeRunState) -> float:
        """Seconds of a run's audio so far; no word is later than its end."""
        if state.ended and not state.waiting:
            return math.inf
        return self._samples(state) / self.decoder.sample_rate_hz

    def _samples(self, state: DecodeRunState) -> int:
        """Samples of a run's audio so far."""
        return (state.decoded - state.context) * self.decoder.samples_per_frame

    def _can_work(self, run: Run) -> bool:
        state: DecodeRunState = run.state
        return not run.blocked and (state.ended or state.waiting >= self._next_take(state) + self.decoder.right)

    def _next_take(self, state: DecodeRunState) -> int:
        """Frames of the next window, if there are as many."""
        return min(state.unsent, self.options.chunk_frames) or state.next_frames

    def _take(self, state: DecodeRunState, tensor: Tensor) -> None:
        """Copy the codes of a tensor; raises BadRequest for another type or shape."""
        shape, dtype = tensor.spec.shape, tensor.spec.dtype
        if dtype != "int16" or len(shape) != 2 or shape[1] != self.decoder.codes:
            wanted = f"int16 [frames, {self.decoder.codes}]"
            raise BadRequest(f"codes must be {wanted} (got {dtype} {list(shape)})", "codes")
        codes = np.frombuffer(tensor.data, np.int16).reshape(shape).copy()
        self.decoder.check(codes)
        state.arrived.append(codes)
        state.waiting += len(codes)

    def _window(self, state: DecodeRunState) -> Window:
        """The next piece of a run; afterwards only its context and what follows are kept."""
        codes = np.concatenate([state.codes, *state.arrived])
        state.arrived.clear()
        left = state.decoded - state.start
        take = min(self._next_take(state), state.waiting)
        end = min(left + take + self.decoder.right, len(codes))
        final = state.ended and end == len(codes)
        window = Window(codes[:end], state.start, left, take, final, state.state)
        state.decoded += take
        state.waiting -= take
        if state.unsent:
            state.unsent -= take
        else:
            state.next_frames = next(state.sizes)
        kept = max(0, left + take - self.decoder.left)
        state.codes = codes[kept:]
        state.start += kept
        return window
