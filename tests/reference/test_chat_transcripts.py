# SPDX-License-Identifier: Apache-2.0
"""Nothing that is said is lost: recordings of known sentences, spoken by the embedded voice, joined with pauses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

pytest.importorskip("hibari", reason="the engine environment is needed (make setup)")
pytest.importorskip("ctranslate2", reason="the engine environment is needed (make setup)")

from tests.kit import chat_speech, spoken_corpus
from tests.kit.spoken_corpus import Layout, Recording
from triton_omni.backends.config.paths import models_dir
from triton_omni.backends.core.outputs import TranscriptPiece
from triton_omni.backends.pipelines.chat.code2wav import SAMPLE_RATE_HZ, code2wav_engine
from triton_omni.backends.pipelines.chat.talker import talker_engine
from triton_omni.backends.pipelines.chat.transcriber import TranscriberEngine, transcriber_engine

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        not all((models_dir() / name).is_file() for name in ("hibari-rvq/BUILT", "whisper-tiny-en/model.bin")),
        reason=f"no models in {models_dir()} (make setup)",
    ),
]
Speak = Callable[[str], np.ndarray]
SEGMENT_LEAD_S = 0.5
WORD_ERROR_POINTS = 0.01
SEED = 4
"""Of a recording in which a decoder without seeking loses a sentence."""


@pytest.fixture(scope="module")
def speak() -> Speak:
    talker = talker_engine(chat_speech.engine_context("talker"))
    code2wav = code2wav_engine(chat_speech.engine_context("code2wav"))
    return cache(lambda text: chat_speech.speak(talker, code2wav, text))


@pytest.fixture(scope="module")
def transcriber() -> TranscriberEngine:
    return transcriber_engine(chat_speech.engine_context("transcriber"))


def record(layout: Layout, seed: int, speak: Speak) -> Recording:
    rng = np.random.default_rng(seed)
    return spoken_corpus.record(layout, spoken_corpus.sentences(rng, layout.count), speak, SAMPLE_RATE_HZ, rng)


def text_of(pieces: list[TranscriptPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def check_segments(pieces: list[TranscriptPiece], seconds: float) -> None:
    """Segments and words are in order and within the audio; segments begin and end with their words."""
    times = [at_s for piece in pieces for at_s in (piece.start_s, piece.end_s)]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= seconds + 0.01, times
    for piece in pieces:
        assert abs(piece.start_s - piece.words[0].start_s) <= SEGMENT_LEAD_S, piece
        assert abs(piece.end_s - piece.words[-1].end_s) <= SEGMENT_LEAD_S, piece


def test_no_sentence_is_lost_where_the_decoder_ends_before_its_window(
    transcriber: TranscriberEngine, speak: Speak
) -> None:
    """Sentences without pauses over the end of a window of 30 s; the thinker reads what a client reads."""
    recording = record(Layout(12), SEED, speak)
    text = text_of(chat_speech.segments(transcriber, recording.samples))
    score = spoken_corpus.align(recording, text)
    assert score.lost == ()
    assert score.errors <= 0.05 * score.words
    assert chat_speech.transcribe(transcriber, [recording.samples]) == [text]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(10, (0.0, 0.4), tail_s=5.0, noise_db=30.0),
        Layout(10, (0.5, 0.5), lead_s=20.0),
        Layout(10, (0.0, 1.5), long_pauses=3, long_pause_s=12.0),
    ],
    ids=["noise", "late start", "long pauses"],
)
def test_no_sentence_is_lost_between_pauses(transcriber: TranscriberEngine, speak: Speak, layout: Layout) -> None:
    recording = record(layout, 7, speak)
    pieces = chat_speech.segments(transcriber, recording.samples)
    score = spoken_corpus.align(recording, text_of(pieces))
    assert score.lost == ()
    assert score.errors <= 0.05 * score.words
    check_segments(pieces, len(recording.samples) / SAMPLE_RATE_HZ)


@pytest.mark.parametrize("lead_s", [0.7, 12.0, 40.0])
def test_segments_begin_with_speech(transcriber: TranscriberEngine, speak: Speak, lead_s: float) -> None:
    recording = record(Layout(1, lead_s=lead_s, tail_s=10.0), 3, speak)
    pieces = chat_speech.segments(transcriber, recording.samples, words=False)
    assert abs(pieces[0].start_s - recording.spoken[0].start_s) <= SEGMENT_LEAD_S
    assert abs(pieces[-1].end_s - recording.spoken[0].end_s) <= SEGMENT_LEAD_S


@pytest.mark.parametrize(("db", "whispered"), [(-45.0, False), (-45.0, True), (-60.0, True)])
def test_quiet_speech_is_speech(transcriber: TranscriberEngine, speak: Speak, db: float, whispered: bool) -> None:
    """As 16-bit samples, which at this level use few steps, with silence behind."""
    recording = record(Layout(6, (0.2, 0.8), tail_s=12.0), 5, speak)
    samples = spoken_corpus.whisper(recording.samples) if whispered else recording.samples
    samples = samples * (10 ** (db / 20) / np.sqrt(np.mean(np.square(samples))))
    pieces = chat_speech.segments(transcriber, (np.rint(samples * 32767) / 32767).astype(np.float32))
    score = spoken_corpus.align(recording, text_of(pieces))
    assert score.lost == ()
    assert score.errors <= 0.05 * score.words


@pytest.mark.soak
def test_none_of_600_sentences_is_lost(transcriber: TranscriberEngine, speak: Speak) -> None:
    """40 recordings of 10 to 60 sentences, 35 s to 10 minutes, with and without pauses and noise."""
    rng = np.random.default_rng(7)
    layouts = spoken_corpus.layouts(rng, files=40, spoken=600)
    texts = iter(spoken_corpus.sentences(rng, 600))
    errors = alone = words = 0
    for layout in layouts:
        recording = spoken_corpus.record(layout, [next(texts) for _ in range(layout.count)], speak, SAMPLE_RATE_HZ, rng)
        pieces = chat_speech.segments(transcriber, recording.samples)
        score = spoken_corpus.align(recording, text_of(pieces))
        assert score.lost == (), layout
        check_segments(pieces, len(recording.samples) / SAMPLE_RATE_HZ)
        clips = [
            recording.samples[round(s.start_s * SAMPLE_RATE_HZ) : round(s.end_s * SAMPLE_RATE_HZ)]
            for s in recording.spoken
        ]
        by_sentence = " ".join(chat_speech.transcribe(transcriber, clips))
        errors += score.errors
        alone += spoken_corpus.align(recording, by_sentence).errors
        words += score.words
    print(f"words wrong: {errors / words:.2%} in recordings, {alone / words:.2%} sentence by sentence")
    assert errors <= alone + WORD_ERROR_POINTS * words
