# SPDX-License-Identifier: Apache-2.0
"""The transcriber: its engine over an ear that measures, and Whisper itself where its weights are."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.kit import engine_driver as drive
from triton_omni.backends.config.paths import models_dir
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import EngineChunk, EngineFinished, EngineOutput, EngineProgress, Run
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, Part, TranscriptionParams
from triton_omni.backends.core.outputs import TranscriptPiece
from triton_omni.backends.pipelines.chat.align import Word, best_path, first_frames, loud_frames, words_at
from triton_omni.backends.pipelines.chat.ear import Segment, WhisperEar
from triton_omni.backends.pipelines.chat.sound import SAMPLE_RATE_HZ, WINDOW_SAMPLES
from triton_omni.backends.pipelines.chat.transcriber import TranscriberEngine


class LevelEar:
    """Says how loud a window is, in hundredths; nothing for silence."""

    def hear(self, samples: np.ndarray, timed: bool = False, worded: bool = False) -> list[Segment]:
        assert len(samples) <= WINDOW_SAMPLES
        level = round(100 * float(np.abs(samples).max()))
        length_s = len(samples) / SAMPLE_RATE_HZ
        half_s = length_s / 2 if timed else length_s
        words = (Word(str(level), 0.0, half_s),) if worded else ()
        halves = (Segment(0.0, half_s, str(level), words), Segment(half_s, length_s, str(level)))
        return list(halves if timed else halves[:1]) if level else []


def engine() -> TranscriberEngine:
    return TranscriberEngine("transcriber", LevelEar(), max_audio_s=120.0)


def asking(*clips: tuple[float, float]) -> Run:
    """A request with one audio part per (level, seconds)."""
    sounds = [np.full(int(seconds * SAMPLE_RATE_HZ), level, np.float32) for level, seconds in clips]
    ends = np.cumsum([len(sound) for sound in sounds])
    parts = tuple(
        Part("audio", offset=int(end) - len(sound), length=len(sound), sample_rate=SAMPLE_RATE_HZ)
        for end, sound in zip(ends, sounds, strict=True)
    )
    request = GenerateRequest(messages=(Message("user", parts),))
    return drive.new_run(request, inputs={"audio": Tensor.of("audio", np.concatenate(sounds))})


def test_every_part_has_its_transcript_in_order() -> None:
    run = asking((0.1, 1), (0.2, 2), (0.3, 0.5))
    events = drive.run_with(engine(), run)
    sent = [event.piece for event in events if isinstance(event, EngineChunk)]
    assert sent == [TranscriptPiece("10"), TranscriptPiece("20", part=1), TranscriptPiece("30", part=2)]
    end = drive.end(events)
    assert isinstance(end, EngineFinished) and end.usage == {"audio_input_s": 3.5}


def test_a_long_part_is_one_transcript_and_shows_progress() -> None:
    run = asking((0.4, 70))
    events = drive.run_with(engine(), run)
    assert [e.piece for e in events if isinstance(e, EngineChunk)] == [TranscriptPiece("40 40 40")]
    heard = [e.done for e in events if isinstance(e, EngineProgress)]
    assert len(heard) == 3 and heard == sorted(heard) and heard[-1] == 70.0


def test_a_client_gets_timed_segments_of_all_the_audio() -> None:
    run = asking((0.4, 40))
    run.wanted, run.feeds = frozenset({"transcript"}), False
    events = drive.run_with(engine(), run)
    said = [event.piece for event in events if isinstance(event, EngineOutput)]
    assert "".join(piece.text for piece in said) == "40 40 40 40"
    times = [at_s for piece in said for at_s in (piece.start_s, piece.end_s)]
    assert times == sorted(times) and (times[0], times[-1]) == (0.0, 40.0)
    assert not any(isinstance(event, EngineChunk) for event in events)


def test_words_have_the_times_of_all_the_audio_and_come_only_if_asked_for() -> None:
    run = asking((0.4, 40))
    run.request = msgspec.structs.replace(run.request, transcription=TranscriptionParams(word_timestamps=True))
    run.wanted, run.feeds = frozenset({"transcript"}), False
    said = [event.piece for event in drive.run_with(engine(), run) if isinstance(event, EngineOutput)]
    assert all(piece.words[0].start_s == piece.start_s for piece in said if piece.words)
    assert [len(piece.words) for piece in said] == [1, 0, 1, 0]


def test_a_path_visits_every_token_in_order() -> None:
    score = np.log(np.array([[9, 9, 1, 1, 1, 1], [1, 1, 2, 2, 9, 1], [1, 1, 9, 1, 1, 9]]))  # the last one looks back
    assert best_path(score).tolist() == [0, 2, 5]
    assert best_path(np.zeros((3, 2))).tolist() == [0, 0, 1], "fewer frames than tokens"
    looks = np.zeros((2, 100))
    looks[0, 10:40], looks[1, 60:80] = 1 / 30, 1 / 20
    assert first_frames(looks)[0] == 0 and 40 <= first_frames(looks)[1] <= 60


def test_words_end_where_silence_begins() -> None:
    """0.2 s of silence, a word, a pause, two words in one breath; borders of the path lie somewhere in between."""
    rate_hz, frame = 1000, 20
    level = np.repeat([0.0, 1.0, 0.0, 1.0, 0.0], [10, 20, 50, 40, 30])
    is_loud = loud_frames(np.repeat(level, frame), rate_hz)
    assert is_loud.tolist() == (level > 0).tolist()
    for second in (25, 60, 82):  # too early, in the pause, too late
        words = list(words_at(["one", "two", "three"], np.array([0, second, 100]), is_loud, 3.0))
        assert words == [Word("one", 0.2, 0.6), Word("two", 1.6, 2.0), Word("three", 2.0, 2.4)], second


def test_the_last_word_ends_with_the_sound() -> None:
    is_loud = loud_frames(np.ones(1010), 1000)
    assert len(is_loud) == 51, "the last frame is half a one"
    assert list(words_at(["one"], np.array([0]), is_loud, 1.01)) == [Word("one", 0.0, 1.01)]


def test_silence_is_an_empty_transcript() -> None:
    events = drive.run_with(engine(), asking((0.0, 40)))
    assert [e.piece for e in events if isinstance(e, EngineChunk)] == [TranscriptPiece()]


def test_a_long_recording_does_not_hold_up_a_short_one() -> None:
    hearing, long, short = engine(), asking((0.5, 100)), asking((0.2, 1))
    hearing.open(long)
    hearing.open(short)
    order = [event.run for _ in range(2) for event in hearing.step() if isinstance(event, EngineProgress)]
    assert order == [long, short]
    assert short not in hearing._runs
    assert len(drive.step_until_idle(hearing)[long]) == 3 + 2  # three windows more, the transcript, the end


def test_a_blocked_run_waits_and_a_stopped_one_is_gone() -> None:
    hearing, run = engine(), asking((0.5, 1))
    hearing.open(run)
    run.blocked = True
    assert not hearing.has_work and list(hearing.step()) == []
    run.blocked = False
    assert hearing.has_work
    hearing.stop(run)
    hearing.stop(run)
    assert not hearing.has_work and list(hearing.step()) == []


def test_a_refused_run_leaves_nothing_behind() -> None:
    hearing = engine()
    with pytest.raises(BadRequest) as refused:
        hearing.open(asking((0.5, 121)))
    assert refused.value.where == "audio" and not hearing.has_work


@pytest.fixture(scope="module")
def whisper() -> WhisperEar:
    pytest.importorskip("torch")
    folder = models_dir() / "whisper-tiny-en"
    if not folder.is_dir():
        pytest.skip(f"no Whisper in {folder}; make setup builds it")
    return WhisperEar(folder, "cpu", threads=1)


@pytest.mark.models
@pytest.mark.parametrize("seconds", [0.001, 5, 30])
def test_whisper_hears_nothing_in_silence_noise_and_a_tone(whisper: WhisperEar, seconds: float) -> None:
    count = max(1, int(seconds * SAMPLE_RATE_HZ))
    rng = np.random.default_rng(0)
    tone = 0.1 * np.sin(2 * np.pi * 440 * np.arange(count) / SAMPLE_RATE_HZ)
    for sound in (np.zeros(count), 0.01 * rng.standard_normal(count), tone):
        assert whisper.hear(sound.astype(np.float32)) == whisper.hear(sound.astype(np.float32), timed=True) == []


@pytest.mark.models
def test_whisper_is_deterministic(whisper: WhisperEar) -> None:
    sound = np.random.default_rng(3).standard_normal(SAMPLE_RATE_HZ).cumsum().astype(np.float32)
    sound /= np.abs(sound).max()
    assert whisper.hear(sound) == whisper.hear(sound)
