# SPDX-License-Identifier: Apache-2.0
"""The codec engine with a small exact decoder: cutting, batching, pausing, refusing and ending."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.kit import engine_driver as drive
from triton_omni.backends.codec.decoder import Window
from triton_omni.backends.codec.engine import CodecEngine, CodecOptions
from triton_omni.backends.core.chunk import Chunk, Tensor
from triton_omni.backends.core.engine import EngineChunk, EngineOutput, Run
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.generate import GenerateRequest

LEFT, RIGHT, HOP = 2, 3, 4


class RunningSum:
    """Audio of a frame: HOP times the sum of the codes around it, plus how many frames the run had before it."""

    codes, left, right, samples_per_frame, sample_rate_hz = 2, LEFT, RIGHT, HOP, 8000

    def __init__(self) -> None:
        self.batches: list[int] = []

    def start(self) -> Any:
        return {"frames": 0}

    def check(self, codes: np.ndarray) -> None:
        if (codes < 0).any():
            raise BadRequest("codes must not be negative", "codes")

    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        self.batches.append(len(windows))
        return [self._one(window) for window in windows]

    def _one(self, window: Window) -> np.ndarray:
        assert window.left == min(self.left, window.start + window.left), "context in front is missing"
        assert window.final or window.right == self.right, "context behind is missing"
        sums = window.codes.sum(1).astype(np.float32)
        made = []
        for row in range(window.left, window.left + window.take):
            around = sums[max(0, row - self.left) : row + self.right + 1].sum()
            made.append(np.full(HOP, around + window.state["frames"], np.float32))
            window.state["frames"] += 1
        return np.concatenate(made)


def engine(**options: Any) -> CodecEngine:
    return CodecEngine("code2wav", RunningSum(), CodecOptions(**options))


def frames(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, (count, 2)).astype(np.int16)


def fed_run(**stages: Any) -> Run:
    run = drive.new_run(GenerateRequest(stages=stages), upstream={"talker"})
    run.feeds = False  # its audio goes to the client alone
    return run


def whole(codes: np.ndarray) -> np.ndarray:
    window = Window(codes, 0, 0, len(codes), True, {"frames": 0})
    return RunningSum().decode([window])[0]


@pytest.mark.parametrize("count", [1, 2, 9, 10, 12, 13, 14, 35, 38, 39, 100])
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_chunks_join_to_the_whole(count: int, pieces: int) -> None:
    codes = frames(count, seed=count)
    chunks = [drive.codes_chunk(piece) for piece in np.array_split(codes, pieces)]
    events = drive.run_with(engine(), fed_run(), chunks)
    np.testing.assert_array_equal(drive.audio(events), whole(codes))
    assert drive.end(events).usage == {"audio_samples": count * HOP}


def test_first_chunk_is_small_and_leaves_as_soon_as_its_context_is_there() -> None:
    codec, run = engine(), fed_run()
    codec.open(run)
    assert codec.feed(run, drive.codes_chunk(frames(10 + RIGHT - 1)), last=False)
    assert not codec.has_work
    assert codec.feed(run, drive.codes_chunk(frames(1)), last=False)
    (event,) = codec.step()
    assert isinstance(event, EngineOutput) and event.tensors[0].spec.shape == (10 * HOP,)
    assert event.piece.sample_rate == 8000
    assert not codec.has_work
    assert codec.feed(run, drive.codes_chunk(frames(25)), last=False)
    (event,) = codec.step()
    assert isinstance(event, EngineOutput) and event.tensors[0].spec.shape == (25 * HOP,)


@pytest.mark.parametrize(("first", "later"), [(1, 1), (3, 7), (100, 2)])
def test_a_request_may_choose_its_chunks_without_another_result(first: int, later: int) -> None:
    codes = frames(40)
    run = fed_run(code2wav={"first_chunk_frames": first, "chunk_frames": later})
    events = drive.run_with(engine(), run, [drive.codes_chunk(codes)])
    np.testing.assert_array_equal(drive.audio(events), whole(codes))
    sizes = [e.tensors[0].spec.shape[0] // HOP for e in events if isinstance(e, EngineOutput)]
    assert sizes[0] == min(first, 40) and all(size == later for size in sizes[1:-1])


def test_a_consumer_gets_the_samples_that_the_client_gets() -> None:
    run = fed_run()
    run.feeds = True
    events = drive.run_with(engine(), run, [drive.codes_chunk(frames(40))])
    chunks = [event.tensors[0].data for event in events if isinstance(event, EngineChunk)]
    np.testing.assert_array_equal(np.concatenate(chunks), drive.audio(events))


@pytest.mark.parametrize("count", [1, 24, 25, 60])
def test_the_audio_goes_on_from_a_context_that_is_not_sent(count: int) -> None:
    codes = frames(count + 40)
    context = Chunk(b"", "talker->code2wav", tensors=(Tensor.of("context", codes[:count]),))
    events = drive.run_with(engine(), fed_run(), [context, drive.codes_chunk(codes[count:])])
    np.testing.assert_array_equal(drive.audio(events), whole(codes)[count * HOP :])
    assert drive.end(events).usage == {"audio_samples": 40 * HOP}
    sizes = [e.tensors[0].spec.shape[0] // HOP for e in events if isinstance(e, EngineOutput)]
    assert sizes == [10, 25, 5], "the context is not counted in the chunks"


def test_a_context_behind_codes_fails_the_run() -> None:
    codec, run = engine(), fed_run()
    codec.open(run)
    codec.feed(run, drive.codes_chunk(frames(1)), last=False)
    with pytest.raises(StageFailed, match="'context' came behind other frames"):
        codec.feed(run, Chunk(b"", "talker", tensors=(Tensor.of("context", frames(1)),)), last=False)


def test_a_ramp_makes_chunks_grow() -> None:
    codes = frames(60)
    options: dict[str, Any] = {"first_chunk_frames": 1, "ramp_frames": (2, 4, 8, 16), "chunk_frames": 25}
    events = drive.run_with(engine(**options), fed_run(), [drive.codes_chunk(codes)])
    np.testing.assert_array_equal(drive.audio(events), whole(codes))
    sizes = [e.tensors[0].spec.shape[0] // HOP for e in events if isinstance(e, EngineOutput)]
    assert sizes == [1, 2, 4, 8, 16, 25, 4]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, [4, 8, 16, 25, 25, 22]),
        ({"first_chunk_frames": 10}, [10, 16, 25, 25, 24]),
        ({"first_chunk_frames": 8, "chunk_frames": 12}, [8, *[12] * 7, 8]),
        ({"first_chunk_frames": 30}, [30, 25, 25, 20]),
        ({"chunk_frames": 3}, [4, *[3] * 32]),
        ({"chunk_frames": 50}, [4, 8, 16, 50, 22]),
    ],
)
def test_of_the_ramp_a_run_takes_what_lies_between_its_own_chunks(own: dict[str, int], expected: list[int]) -> None:
    codes = frames(100)
    codec = engine(first_chunk_frames=4, ramp_frames=(8, 16), chunk_frames=25)
    events = drive.run_with(codec, fed_run(code2wav=own), [drive.codes_chunk(codes)])
    np.testing.assert_array_equal(drive.audio(events), whole(codes))
    assert [e.tensors[0].spec.shape[0] // HOP for e in events if isinstance(e, EngineOutput)] == expected


@pytest.mark.parametrize("ramp", [(8, 8), (16, 8), (10,), (25,), (8, 30)])
def test_a_ramp_that_does_not_grow_is_refused(ramp: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ramp_frames must grow"):
        engine(ramp_frames=ramp)


@pytest.mark.parametrize(
    ("options", "where"),
    [({"chunk_frame": 3}, "stages.code2wav.chunk_frame"), ({"chunk_frames": 0}, "stages.code2wav.chunk_frames")],
)
def test_unknown_and_impossible_options_are_refused(options: dict[str, Any], where: str) -> None:
    codec = engine()
    with pytest.raises(BadRequest) as error:
        codec.open(fed_run(code2wav=options))
    assert error.value.where == where and not codec.has_work


@pytest.mark.parametrize("key", ["first_chunk_frames", "chunk_frames"])
def test_a_chunk_that_the_queue_cannot_hold_is_refused(key: str) -> None:
    """It would never be complete: the queue says "not now" before."""
    codes = [drive.codes_chunk(frames(1)) for _ in range(60)]
    codec = engine(max_queued_frames=50)
    with pytest.raises(BadRequest) as error:
        codec.open(fed_run(code2wav={key: 51 - RIGHT}))
    assert error.value.where == f"stages.code2wav.{key}" and not codec.has_work
    events = drive.run_with(codec, fed_run(code2wav={key: 50 - RIGHT}), [*codes, drive.codes_chunk(None)])
    assert drive.end(events).usage == {"audio_samples": 60 * HOP}
    with pytest.raises(ValueError, match="max_queued_frames"):
        engine(max_queued_frames=24 + RIGHT)


def test_a_chunk_without_codes_is_an_error_that_names_edge_and_key() -> None:
    codec, run = engine(), fed_run()
    codec.open(run)
    chunk = Chunk(b"", "talker", tensors=(Tensor.of("codez", frames(5)),))
    with pytest.raises(StageFailed, match="'codes'") as error:
        codec.feed(run, chunk, last=False)
    assert error.value.where == "talker->code2wav"


def test_runs_of_different_lengths_share_steps_and_equal_runs_alone() -> None:
    codec = engine()
    all_codes = [frames(count, seed=count) for count in (5, 30, 61, 100)]
    runs = [fed_run() for _ in all_codes]
    for run, codes in zip(runs, all_codes, strict=True):
        codec.open(run)
        assert codec.feed(run, drive.codes_chunk(codes), last=True)
    events = drive.step_until_idle(codec)
    for run, codes in zip(runs, all_codes, strict=True):
        np.testing.assert_array_equal(drive.audio(events[run]), whole(codes))
    assert codec.decoder.batches[0] == 4, "the first step takes all runs"  # type: ignore[attr-defined]


def test_more_runs_than_a_batch_take_turns() -> None:
    codec = engine(max_batch=2)
    runs = [fed_run() for _ in range(5)]
    for run in runs:
        codec.open(run)
        assert codec.feed(run, drive.codes_chunk(frames(100)), last=True)
    first_seen = [event.run for _ in range(3) for event in codec.step()]
    assert set(first_seen) == set(runs)


def test_full_queue_says_not_now_and_takes_again_later() -> None:
    codec, run = engine(max_queued_frames=50), fed_run()
    codec.open(run)
    assert codec.feed(run, drive.codes_chunk(frames(50)), last=False)
    assert not codec.feed(run, drive.codes_chunk(frames(1)), last=False)
    codec.step()
    assert codec.feed(run, drive.codes_chunk(frames(1)), last=False)


def test_blocked_run_waits_and_loses_nothing() -> None:
    codec, run, other = engine(), fed_run(), fed_run()
    codes = frames(60)
    for each in (run, other):
        codec.open(each)
        assert codec.feed(each, drive.codes_chunk(codes), last=True)
    run.blocked = True
    events = drive.step_until_idle(codec)
    assert run not in events
    np.testing.assert_array_equal(drive.audio(events[other]), whole(codes))
    run.blocked = False
    np.testing.assert_array_equal(drive.audio(drive.step_until_idle(codec)[run]), whole(codes))


def test_edge_that_ends_without_a_frame_ends_silently() -> None:
    events = drive.run_with(engine(), fed_run(), [drive.codes_chunk(None), drive.codes_chunk(None)])
    assert len(events) == 1 and drive.end(events).usage == {"audio_samples": 0}


def test_empty_tensor_is_no_frame() -> None:
    events = drive.run_with(engine(), fed_run(), [drive.codes_chunk(frames(0)), drive.codes_chunk(frames(3))])
    assert drive.end(events).usage == {"audio_samples": 3 * HOP}


def test_stopped_run_is_silent() -> None:
    codec, run = engine(), fed_run()
    codec.open(run)
    assert codec.feed(run, drive.codes_chunk(frames(60)), last=True)
    codec.step()
    codec.stop(run)
    assert not codec.has_work and not codec.step()
    codec.stop(run)


@pytest.mark.parametrize(
    "codes", [np.zeros((4, 3), np.int16), np.zeros(4, np.int16), np.zeros((4, 2), np.int32), -np.ones((4, 2), np.int16)]
)
def test_codes_of_another_shape_type_or_range_are_refused(codes: np.ndarray) -> None:
    codec, run = engine(), fed_run()
    codec.open(run)
    with pytest.raises(BadRequest) as error:
        codec.feed(run, drive.codes_chunk(codes), last=True)
    assert error.value.where == "codes"


def test_fed_codes_are_copied() -> None:
    codec, run = engine(), fed_run()
    codes = frames(20)
    codec.open(run)
    given = codes.copy()
    assert codec.feed(run, drive.codes_chunk(given), last=True)
    given[:] = 7
    np.testing.assert_array_equal(drive.audio(drive.step_until_idle(codec)[run]), whole(codes))
