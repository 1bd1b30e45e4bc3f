# SPDX-License-Identifier: Apache-2.0
"""The transcriber stage: its engine over a transcriber that measures, and over Whisper where its weights are."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from tests.kit import engine_driver as drive
from triton_omni.backends.config.paths import models_dir
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import EngineChunk, EngineFinished, EngineOutput, EngineProgress, Run
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, Part, TranscriptionParams
from triton_omni.backends.core.outputs import SegmentDecoding, TranscriptPiece
from triton_omni.backends.pipelines.chat.audio_windows import SAMPLE_RATE_HZ, WINDOW_SAMPLES
from triton_omni.backends.pipelines.chat.transcriber import SHORT_SAMPLES, TranscriberEngine
from triton_omni.backends.pipelines.chat.transcription import Segment, Transcriber, WindowTranscript
from triton_omni.backends.pipelines.chat.transcription_model import DecodedWindow, EncodedWindow, WhisperModel
from triton_omni.backends.pipelines.chat.word_alignment import Word, loud_frames, words_at


class LevelTranscriber:
    """Says how loud a window of 30 s is, in hundredths, once for each half; nothing for silence."""

    def transcribe(self, samples: np.ndarray, timestamps: bool) -> WindowTranscript:
        window = samples[:WINDOW_SAMPLES]
        level = round(100 * float(np.abs(window).max()))
        half_s = len(window) / SAMPLE_RATE_HZ / 2
        spans = ((0.0, half_s), (half_s, 2 * half_s)) if level else ()
        words = lambda start_s, end_s: (Word(str(level), start_s, end_s),) if timestamps else ()  # noqa: E731
        facts = {"tokens": (level,), "avg_logprob": -0.25, "compression_ratio": 0.5, "no_speech_prob": 0.125}
        segments = (Segment(text=str(level), start_s=s, end_s=e, words=words(s, e), **facts) for s, e in spans)
        return WindowTranscript(tuple(segments), 0, len(window))


def engine() -> TranscriberEngine:
    return TranscriberEngine("transcriber", LevelTranscriber(), max_audio_s=120.0)


def asking(*clips: tuple[float, float]) -> Run:
    """A request with one audio part per (level, seconds)."""
    clips = [np.full(int(seconds * SAMPLE_RATE_HZ), level, np.float32) for level, seconds in clips]
    ends = np.cumsum([len(clip) for clip in clips])
    parts = tuple(
        Part("audio", offset=int(end) - len(clip), length=len(clip), sample_rate=SAMPLE_RATE_HZ)
        for end, clip in zip(ends, clips, strict=True)
    )
    request = GenerateRequest(messages=(Message("user", parts),))
    return drive.new_run(request, inputs={"audio": Tensor.of("audio", np.concatenate(clips))})


def test_every_part_has_its_transcript_in_order() -> None:
    run = asking((0.1, 1), (0.2, 2), (0.3, 0.5))
    events = drive.run_with(engine(), run)
    sent = [event.piece for event in events if isinstance(event, EngineChunk)]
    assert sent == [TranscriptPiece("10 10"), TranscriptPiece("20 20", part=1), TranscriptPiece("30 30", part=2)]
    end = drive.end(events)
    assert isinstance(end, EngineFinished) and end.usage == {"audio_input_s": 3.5}


def test_a_long_part_is_one_transcript_and_shows_progress() -> None:
    run = asking((0.4, 70))
    events = drive.run_with(engine(), run)
    assert [e.piece for e in events if isinstance(e, EngineChunk)] == [TranscriptPiece("40 40 40 40 40 40")]
    done_s = [e.done for e in events if isinstance(e, EngineProgress)]
    assert len(done_s) == 3 and done_s == sorted(done_s) and done_s[-1] == 70.0


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
    assert all(piece.words[0].start_s == piece.start_s for piece in said)
    assert [len(piece.words) for piece in said] == [1, 1, 1, 1]
    run = asking((0.4, 1))
    run.wanted = frozenset({"transcript"})
    said = [event.piece for event in drive.run_with(engine(), run) if isinstance(event, EngineOutput)]
    assert [piece.text for piece in said] == ["40", " 40"] and not any(piece.words for piece in said)


def test_segments_say_how_they_were_decoded() -> None:
    run = asking((0.4, 40))
    run.wanted, run.feeds = frozenset({"transcript"}), False
    said = [event.piece.decoding for event in drive.run_with(engine(), run) if isinstance(event, EngineOutput)]
    assert said[0] == said[1] == SegmentDecoding(0, (40,), 0.0, -0.25, 0.5, 0.125)
    assert said[2] == said[3] == SegmentDecoding(3000, (40,), 0.0, -0.25, 0.5, 0.125), "the second window"


def test_words_end_where_silence_begins() -> None:
    """0.2 s of silence, a word, a pause, two words in one breath; borders of the path lie somewhere in between."""
    rate_hz, frame = 1000, 20
    level = np.repeat([0.0, 1.0, 0.0, 1.0, 0.0], [10, 20, 50, 40, 30])
    is_loud = loud_frames(np.repeat(level, frame), rate_hz)
    assert is_loud.tolist() == (level > 0).tolist()
    for second in (25, 60, 82):  # too early, in the pause, too late
        words = list(words_at(["one", "two", "three"], np.array([0, second, 100]), is_loud, 3.0))
        assert words == [Word("one", 0.2, 0.6), Word("two", 1.6, 2.0), Word("three", 2.0, 2.4)], second


def test_every_word_has_a_span() -> None:
    """Alignment may give a word no frame; it shares those of the word before it, the first one those after it."""
    is_loud = np.ones(100, bool)
    words = words_at(["the", "lazy", "dog"], np.array([0, 70, 70]), is_loud, 2.0)
    assert [(w.start_s, w.end_s) for w in words] == [(0.0, 0.6), (0.6, 1.4), (1.4, 2.0)]
    words = words_at(["a", "bcd", "e"], np.array([0, 0, 60]), is_loud, 2.0)
    assert [(w.start_s, w.end_s) for w in words] == [(0.0, 0.3), (0.3, 1.2), (1.2, 2.0)]


def test_a_word_aligned_with_a_pause_is_where_something_is_said() -> None:
    """The second word is said before the pause in which alignment puts it."""
    is_loud = np.repeat([True, False, True], [50, 400, 50])
    words = words_at(["was", "closed", "the"], np.array([0, 200, 450]), is_loud, 10.0)
    assert [(w.start_s, w.end_s) for w in words] == [(0.0, 0.32), (0.32, 1.0), (9.0, 10.0)]


def test_the_last_word_ends_with_the_audio() -> None:
    is_loud = loud_frames(np.ones(1010), 1000)
    assert len(is_loud) == 51, "the last frame is half a one"
    assert list(words_at(["one"], np.array([0]), is_loud, 1.01)) == [Word("one", 0.0, 1.01)]


def test_silence_is_an_empty_transcript() -> None:
    events = drive.run_with(engine(), asking((0.0, 40)))
    assert [e.piece for e in events if isinstance(e, EngineChunk)] == [TranscriptPiece()]


class PhraseModel:
    """A SpeechModel that writes one phrase, of the words 1 2 3, up to a frame of the window."""

    first_timestamp = 1000

    def __init__(self, end: int) -> None:
        self.end = end

    def encode(self, samples: np.ndarray) -> EncodedWindow:
        return EncodedWindow(None, len(samples))

    def decode(self, encoded: EncodedWindow, no_repeat: bool = False) -> DecodedWindow:
        return DecodedWindow((1000, 1, 2, 3, 1000 + self.end), -0.1, 0.0)

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(f" {token}" for token in tokens if token < 1000)

    def first_frames(self, encoded: EncodedWindow, tokens: Sequence[int], frames: int) -> np.ndarray:
        return np.linspace(0, frames, len(tokens), endpoint=False).astype(np.int64)


def test_a_window_ends_with_its_last_phrase_and_no_word_ends_behind_it() -> None:
    audio = np.full(40 * SAMPLE_RATE_HZ, 0.3, np.float32)
    audio[700 * 320 + 100 : 700 * 320 + 900] = 0.2  # the quietest place, within a frame
    window = Transcriber(PhraseModel(700)).transcribe(audio, timestamps=True)
    assert (window.begin, window.end) == (0, 700 * 320 + 500)
    (segment,) = window.segments
    assert segment.text == "1 2 3" and len(segment.words) == 3
    assert segment.end_s == segment.words[-1].end_s <= window.end / SAMPLE_RATE_HZ


def test_a_late_timestamp_does_not_cut_what_follows_a_pause() -> None:
    """The phrase is said in the first 4 s; its timestamp is half a second into the next one."""
    audio = np.zeros(20 * SAMPLE_RATE_HZ, np.float32)
    audio[: 4 * SAMPLE_RATE_HZ] = audio[12 * SAMPLE_RATE_HZ :] = 0.3
    window = Transcriber(PhraseModel(625)).transcribe(audio, timestamps=True)
    assert 11 * SAMPLE_RATE_HZ <= window.end < 12 * SAMPLE_RATE_HZ
    assert window.segments[-1].end_s == 4.0


class GatedTranscriber(LevelTranscriber):
    """Holds windows of long recordings until `go` is set."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()

    def transcribe(self, samples: np.ndarray, timestamps: bool) -> WindowTranscript:
        if len(samples) > SHORT_SAMPLES:
            self.begun.set()
            assert self.go.wait(60)
        return super().transcribe(samples, timestamps)


def test_a_short_clip_does_not_wait_for_a_window_of_a_long_recording() -> None:
    gated = GatedTranscriber()
    transcribing, long, short = TranscriberEngine("transcriber", gated, 120.0), asking((0.5, 100)), asking((0.2, 1))
    transcribing.open(long)
    transcribing.step()
    assert gated.begun.wait(60)
    transcribing.open(short)
    events = transcribing.step()
    assert {event.run for event in events} == {short} and isinstance(events[-1], EngineFinished)
    assert transcribing.has_work
    gated.go.set()
    assert len(drive.step_until_idle(transcribing)[long]) == 4 + 2  # four windows, the transcript, the end


def test_a_run_stopped_within_a_window_says_no_more() -> None:
    gated = GatedTranscriber()
    transcribing, stopped, other = TranscriberEngine("transcriber", gated, 120.0), asking((0.5, 40)), asking((0.2, 40))
    transcribing.open(stopped)
    transcribing.step()
    assert gated.begun.wait(60)
    transcribing.stop(stopped)
    transcribing.open(other)
    gated.go.set()
    assert set(drive.step_until_idle(transcribing)) == {other}
    assert not transcribing.has_work
    transcribing.close()


def test_long_recordings_take_turns() -> None:
    transcribing, first, second = engine(), asking((0.5, 70)), asking((0.2, 70))
    transcribing.open(first)
    transcribing.open(second)
    order: list[Run] = []
    while transcribing.has_work:
        order += [event.run for event in transcribing.step() if isinstance(event, EngineProgress)]
    assert order[:4] == [first, second, first, second]


def test_a_blocked_run_waits_and_a_stopped_one_is_gone() -> None:
    transcribing, run = engine(), asking((0.5, 1))
    transcribing.open(run)
    run.blocked = True
    assert not transcribing.has_work and list(transcribing.step()) == []
    run.blocked = False
    assert transcribing.has_work
    transcribing.stop(run)
    transcribing.stop(run)
    assert not transcribing.has_work and list(transcribing.step()) == []


def test_a_refused_run_leaves_nothing_behind() -> None:
    transcribing = engine()
    with pytest.raises(BadRequest) as refused:
        transcribing.open(asking((0.5, 121)))
    assert refused.value.where == "audio" and not transcribing.has_work


@pytest.fixture(scope="module")
def whisper() -> Transcriber:
    pytest.importorskip("ctranslate2", reason="the engine environment is needed (make setup)")
    folder = models_dir() / "whisper-tiny-en"
    if not (folder / "model.bin").is_file():
        pytest.skip(f"no Whisper in {folder}; make setup builds it")
    return Transcriber(WhisperModel(folder, "cpu", threads=1, compute_type="int8"))


@pytest.mark.models
@pytest.mark.parametrize("seconds", [0.001, 5, 30])
def test_whisper_transcribes_nothing_in_silence_noise_and_a_tone(whisper: Transcriber, seconds: float) -> None:
    count = max(1, int(seconds * SAMPLE_RATE_HZ))
    rng = np.random.default_rng(0)
    tone = 0.1 * np.sin(2 * np.pi * 440 * np.arange(count) / SAMPLE_RATE_HZ)
    for audio in (np.zeros(count), 0.01 * rng.standard_normal(count), tone):
        for timestamps in (False, True):
            assert whisper.transcribe(audio.astype(np.float32), timestamps).segments == ()


@pytest.mark.models
def test_whisper_is_deterministic(whisper: Transcriber) -> None:
    audio = np.random.default_rng(3).standard_normal(SAMPLE_RATE_HZ).cumsum().astype(np.float32)
    audio /= np.abs(audio).max()
    assert whisper.transcribe(audio, True) == whisper.transcribe(audio, True)
