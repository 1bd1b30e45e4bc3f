# SPDX-License-Identifier: Apache-2.0
"""Deterministic tiny engines: tokens → frames → sine audio, and on request every way to misbehave.

What a run does beyond its work is in the request, per stage (`stages.<stage>.<option>`), counted in chunks of
that run: see Options.
"""

from __future__ import annotations

import functools
import math
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import (
    EngineChunk,
    EngineEvent,
    EngineFailed,
    EngineFinished,
    EngineOutput,
    EngineProgress,
    Run,
)
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.generate import stage_options
from triton_omni.backends.core.outputs import AudioPiece, TextPiece
from triton_omni.backends.core.pipeline import CLIENT_EDGE

SAMPLE_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 240  # 10 ms, so that tests with thousands of frames stay small
TONE_HZ = 440.0
FRAMES_PER_TOKEN = 2
FRAME_WIDTH = 8
DEFAULT_TOKENS = 16
QUEUE_CHUNKS = 4  # inputs a run takes before it says "not now": makes back-pressure visible in tests
_PERIOD = 251  # of the filler's bytes: a prime, so that no power of two hides a shift
PAUSE_S = 0.002  # how long a step may wait for the next due run; other messages wait no longer than this

Count = Annotated[int, msgspec.Meta(ge=0)]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a run behaves. `*_after` counts its chunks; None means never.

    delay_s       least time between two chunks
    together      produce nothing until this many runs are open at once
    hold_after    produce nothing after this
    fail_after    fail this run
    raise_after   raise out of step: the whole worker ends
    die_after     kill -9 of the worker
    hang_after    block inside step for `hang_s`
    refuse        refuse the run at open
    burst         chunks per step
    frame_bytes   extra payload per chunk, checked by the consumer
    output_every  only every n-th output goes to the client
    progress      report progress before each chunk
    """

    delay_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    together: Count = 0
    hold_after: Count | None = None
    fail_after: Count | None = None
    raise_after: Count | None = None
    die_after: Count | None = None
    hang_after: Count | None = None
    hang_s: Annotated[float, msgspec.Meta(ge=0)] = 3600.0
    refuse: bool = False
    burst: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    frame_bytes: Annotated[int, msgspec.Meta(ge=0, le=256 << 20)] = 0
    output_every: Annotated[int, msgspec.Meta(ge=1)] = 1
    progress: bool = False


@dataclass(eq=False, slots=True)
class ToyRun:
    """State of one run: what waits, what was made, and when the next chunk is due."""

    options: Options
    waiting: deque[tuple[Any, bool]] = field(default_factory=deque[tuple[Any, bool]])
    made: int = 0
    phase: int = 0
    due_s: float = 0.0
    released: bool = False
    """`together` runs were open at once."""
    text: str = ""
    """Of a client that streams it: the word that is not complete yet."""


Work = Callable[[Run, ToyRun], "list[EngineEvent] | None"]
"""Make the next chunk's events, or None if there is nothing to make it from."""


class ToyEngine:
    """Steps every run that is due; `work` is what the stage does."""

    def __init__(self, stage: str, work: Work) -> None:
        self.stage = stage
        self._work = work
        self._runs: list[Run] = []

    def open(self, run: Run) -> None:
        state = ToyRun(stage_options(run.options(self.stage), Options, self.stage))
        if state.options.refuse:
            raise BadRequest("refused on request", f"stages.{self.stage}.refuse")
        run.state = state
        self._runs.append(run)
        for other in self._runs:
            other.state.released |= other.state.options.together <= len(self._runs)

    def feed(self, run: Run, inputs: Any, last: bool) -> bool:
        if len(run.state.waiting) >= QUEUE_CHUNKS:
            return False
        run.state.waiting.append((inputs, last))
        return True

    def stop(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)

    @property
    def has_work(self) -> bool:
        return any(self._can_work(run) for run in self._runs)

    def step(self) -> Sequence[EngineEvent]:
        ready = [run for run in self._runs if self._can_work(run)]
        now = time.monotonic()
        due = [run for run in ready if run.state.due_s <= now]
        if not due and ready:
            time.sleep(min(PAUSE_S, min(run.state.due_s for run in ready) - now))
            return ()
        events: list[EngineEvent] = []
        for run in due:
            run.state.due_s = now + run.state.options.delay_s
            for _ in range(run.state.options.burst):
                if run not in self._runs or not self._advance(run, events):
                    break
        return events

    def close(self) -> None:
        self._runs.clear()

    def _can_work(self, run: Run) -> bool:
        state: ToyRun = run.state
        held = state.options.hold_after is not None and state.made >= state.options.hold_after
        return state.released and not run.blocked and not held and (not run.upstream or bool(state.waiting))

    def _advance(self, run: Run, events: list[EngineEvent]) -> bool:
        """Make one chunk of one run; False if it made none."""
        state: ToyRun = run.state
        self._misbehave(state)
        if state.options.fail_after is not None and state.made >= state.options.fail_after:
            self._runs.remove(run)
            events.append(EngineFailed(run, StageFailed("failed on request", self.stage)))
            return False
        if state.options.hold_after is not None and state.made >= state.options.hold_after:
            return False
        made = self._work(run, state)
        if made is None:
            return False
        if state.options.progress:
            events.append(EngineProgress(run, state.made))
        events += made
        state.made += 1
        if any(isinstance(event, EngineFinished) for event in made):
            self._runs.remove(run)
        return True

    def _misbehave(self, state: ToyRun) -> None:
        wanted = state.options
        if wanted.die_after is not None and state.made >= wanted.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if wanted.raise_after is not None and state.made >= wanted.raise_after:
            raise RuntimeError("raised on request")
        if wanted.hang_after is not None and state.made >= wanted.hang_after:
            time.sleep(wanted.hang_s)


def tokens(run: Run, state: ToyRun) -> list[EngineEvent] | None:
    """Stage `tokens`: one word per step, `max_tokens` of them."""
    total = run.request.sampling.max_tokens or DEFAULT_TOKENS
    events: list[EngineEvent] = []
    texts = [p.text for m in run.request.messages for p in m.parts] or [run.request.input]
    prompt = sum(len(text.split()) for text in texts)
    if state.made % state.options.output_every == 0:
        first = 0 if state.made else prompt
        events.append(EngineOutput(run, TextPiece(f"w{state.made} ", (state.made,), prompt_tokens=first)))
    if run.feeds:
        events.append(EngineChunk(run, _filler(state), TextPiece(token_ids=(state.made,))))
    if state.made + 1 == total:
        events.append(EngineFinished(run, "length", {"prompt_tokens": prompt, "completion_tokens": total}))
    return events


def frames(run: Run, state: ToyRun) -> list[EngineEvent] | None:
    """Stage `frames`: FRAMES_PER_TOKEN rows of the token's number; from a text, one token per word."""
    if CLIENT_EDGE in run.upstream:
        return _frames_of_text(run, state)
    if run.upstream:
        if not state.waiting:
            return None
        token, last = state.waiting.popleft()
    else:
        words = run.request.input.split()
        token, last = state.made, state.made + 1 >= len(words)
    events: list[EngineEvent] = []
    if token is not None:
        rows = Tensor.of("frames", _rows(token, FRAMES_PER_TOKEN))
        events.append(EngineChunk(run, (rows, *_filler(state)), TextPiece(token_ids=(token,))))
    if last:
        events.append(EngineFinished(run))
    return events


def _frames_of_text(run: Run, state: ToyRun) -> list[EngineEvent] | None:
    """The same from a piece of a text that streams: its complete words."""
    if not state.waiting:
        return None
    text, last = state.waiting.popleft()
    *words, state.text = re.split(r"\s+", state.text + text)
    if last:
        words.append(state.text)
    events: list[EngineEvent] = []
    for token in range(state.phase, state.phase + sum(map(bool, words))):
        rows = Tensor.of("frames", _rows(token, FRAMES_PER_TOKEN))
        events.append(EngineChunk(run, (rows,), TextPiece(token_ids=(token,))))
        state.phase = token + 1
    return [*events, EngineFinished(run)] if last else events


def wave(run: Run, state: ToyRun) -> list[EngineEvent] | None:
    """Stage `wave`: a sine that goes on without a break over all frames."""
    if not state.waiting:
        return None
    rows, last = state.waiting.popleft()
    events: list[EngineEvent] = []
    if rows:
        if state.made % state.options.output_every == 0:
            audio = sine(state.phase, rows * SAMPLES_PER_FRAME)
            events.append(EngineOutput(run, AudioPiece(SAMPLE_RATE_HZ, len(audio)), (Tensor.of("audio", audio),)))
        state.phase += rows * SAMPLES_PER_FRAME
    if last:
        events.append(EngineFinished(run, "stop", {"audio_samples": state.phase}))
    return events


def sine(start: int, samples: int) -> np.ndarray:
    """Samples `start` … of the toy voice; (samples,) float32."""
    n = np.arange(start, start + samples, dtype=np.float64)
    return (0.25 * np.sin(2 * math.pi * TONE_HZ / SAMPLE_RATE_HZ * n)).astype(np.float32)


def token_of(chunk: Chunk) -> int | None:
    """Adapter tokens → frames: the token's number; None for an empty last chunk."""
    _check_filler(chunk)
    return _token(chunk)


def text_of(chunk: Chunk) -> str:
    """Adapter client → frames: the text; "" for an empty last chunk."""
    piece = chunk.piece_of(TextPiece)
    return piece.text if piece is not None else ""


def rows_of(chunk: Chunk) -> int:
    """Adapter frames → wave: how many frames; checks that they carry their token's number."""
    _check_filler(chunk)
    if chunk.is_empty:
        return 0
    tensor = chunk.tensor("frames")
    if tensor is None:
        raise KeyError("frames")
    count = tensor.spec.shape[0]
    token = None if chunk.piece is None else _token(chunk)  # a chunk from outside has frames alone
    if token is not None and memoryview(tensor.data).tobytes() != _rows(token, count).tobytes():
        raise StageFailed("frames are not what was sent", "frames->wave")
    return count


def _token(chunk: Chunk) -> int | None:
    piece = chunk.piece_of(TextPiece)
    return piece.token_ids[0] if piece is not None else None


@functools.lru_cache(maxsize=8192)
def _rows(token: int, count: int) -> np.ndarray:
    return np.full((count, FRAME_WIDTH), token, np.float32)


def _filler(state: ToyRun) -> tuple[Tensor, ...]:
    """Bytes that count on from the chunk's index: a view, so that making them costs nothing."""
    size, start = state.options.frame_bytes, state.made % _PERIOD
    return (Tensor.of("filler", _counting(size)[start : start + size]),) if size else ()


def _check_filler(chunk: Chunk) -> None:
    tensor = chunk.tensor("filler")
    if tensor is not None:
        data = memoryview(tensor.data)
        if data[0] != chunk.index % _PERIOD or data[-1] != (chunk.index + len(data) - 1) % _PERIOD:
            raise StageFailed("payload is not what was sent", f"edge {chunk.edge}")


@functools.lru_cache(maxsize=4)
def _counting(size: int) -> np.ndarray:
    return np.resize(np.arange(_PERIOD, dtype=np.uint8), size + _PERIOD)
