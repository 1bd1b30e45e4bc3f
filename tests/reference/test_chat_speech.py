# SPDX-License-Identifier: Apache-2.0
"""What the talker and code2wav say is understood by the transcriber: the whole audio path on real weights."""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("hibari", reason="the engine environment is needed (make setup)")
pytest.importorskip("torch", reason="the engine environment is needed (make setup)")

from tests.kit import engine_driver as drive
from tests.kit import spoken_corpus
from tests.kit.chat_speech import engine_context, segments, speak, speak_timed, transcribe
from triton_omni.backends.codec.engine import CodecEngine
from triton_omni.backends.config.paths import models_dir
from triton_omni.backends.core.engine import EngineEvent, EngineOutput
from triton_omni.backends.core.outputs import WordTime
from triton_omni.backends.pipelines.chat.code2wav import SAMPLE_RATE_HZ, code2wav_engine
from triton_omni.backends.pipelines.chat.talker import TalkerEngine, talker_engine
from triton_omni.backends.pipelines.chat.transcriber import TranscriberEngine, transcriber_engine

MODELS = ("hibari-rvq", "whisper-tiny-en")
pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        not all((models_dir() / name).is_dir() for name in MODELS), reason=f"no {MODELS} in {models_dir()} (make setup)"
    ),
]
WORD_ERROR_RATE_MAX = 0.10
SENTENCES = (
    "The weather is nice and warm today.",
    "Please open the window before you leave.",
    "My sister lives in a small house near the river.",
    "We had fresh bread and butter for breakfast.",
    "The train to the city leaves in ten minutes.",
    "He forgot his umbrella on the bus this morning.",
    "Can you tell me the way to the station?",
    "The children played in the garden until dinner.",
    "I would like a cup of tea with milk.",
    "The old man told us a long story.",
    "Turn left at the corner and walk straight on.",
    "The book on the table belongs to my teacher.",
    "It rained all night, but the morning was clear.",
    "Thank you very much for your kind letter.",
    "The doctor asked him to rest for a week.",
    "A yellow bird sat on the branch and sang.",
    "She bought a new pair of shoes for the party.",
    "They walked along the beach and watched the waves.",
    "The answer to your question is very simple.",
    "Dogs are friendly animals and like to run.",
)


@pytest.fixture(scope="module")
def talker() -> TalkerEngine:
    return talker_engine(engine_context("talker"))


@pytest.fixture(scope="module")
def code2wav() -> CodecEngine:
    return code2wav_engine(engine_context("code2wav"))


@pytest.fixture(scope="module")
def transcriber() -> TranscriberEngine:
    return transcriber_engine(engine_context("transcriber"))


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def word_errors(said: list[str], got: list[str]) -> int:
    """Substitutions, insertions and deletions (Levenshtein's distance over words)."""
    row = list(range(len(got) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(got, 1):
            before, row[j] = row[j], min(before + (word != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def test_spoken_sentences_are_understood(
    talker: TalkerEngine, code2wav: CodecEngine, transcriber: TranscriberEngine
) -> None:
    clock = time.process_time
    began_s = clock()
    clips = [speak(talker, code2wav, sentence) for sentence in SENTENCES]
    spoke_s, began_s = clock() - began_s, clock()
    got = transcribe(transcriber, clips)
    transcribed_s = clock() - began_s
    seconds = sum(map(len, clips)) / SAMPLE_RATE_HZ
    errors = [word_errors(words(said), words(text)) for said, text in zip(SENTENCES, got, strict=True)]
    rate = sum(errors) / sum(len(words(said)) for said in SENTENCES)
    for said, text, wrong in zip(SENTENCES, got, errors, strict=True):
        if wrong:
            print(f"said  {said}\ngot   {text}")
    print(f"word error rate {rate:.1%} over {len(SENTENCES)} sentences, {seconds:.0f} s of audio;")
    print(
        f"CPU seconds per second of audio: speaking {spoke_s / seconds:.4f}, transcribing {transcribed_s / seconds:.3f}"
    )
    assert rate <= WORD_ERROR_RATE_MAX


@pytest.mark.soak
def test_the_voices_word_times_agree_with_the_transcribers(
    talker: TalkerEngine, code2wav: CodecEngine, transcriber: TranscriberEngine
) -> None:
    """Of 48 sentences those that Whisper hears as they were said: its alignment, which is often a phoneme off between
    words without a pause, is the second opinion."""
    starts, ends, agreed = list[float](), list[float](), 0
    for sentence in spoken_corpus.sentences(np.random.default_rng(48), 48):
        audio, said = speak_timed(talker, code2wav, sentence)
        heard = timed_words(transcriber, audio)
        assert [word.word for word in said] == sentence.split()
        times = [at_s for word in said for at_s in (word.start_s, word.end_s)]
        assert times == sorted(times) and times[0] > 0 and times[-1] <= len(audio) / SAMPLE_RATE_HZ
        if [words(word.word) for word in heard] == [words(word.word) for word in said]:
            agreed += 1
            starts += [h.start_s - s.start_s for h, s in zip(heard, said, strict=True)]
            ends += [h.end_s - s.end_s for h, s in zip(heard, said, strict=True)]
    off = {name: np.abs(np.array(times)) for name, times in (("starts", starts), ("ends", ends))}
    print(f"{agreed} of 48 sentences, {len(starts)} words")
    for name, seconds in off.items():
        print(f"{name}: mean {seconds.mean():.3f} s off, median {np.median(seconds):.3f}, worst {seconds.max():.2f}")
    assert agreed >= 40
    assert abs(np.mean(starts)) <= 0.015, "one of the two is late as a rule"
    assert np.median(off["starts"]) <= 0.05 and off["starts"].mean() <= 0.065


def test_audio_of_a_streamed_text_is_the_audio_of_the_whole(talker: TalkerEngine, code2wav: CodecEngine) -> None:
    """Byte for byte, with code2wav fed while the text is still coming."""
    text = "Well, this is one. And here is another sentence, with 3.14 in it! Good bye"
    run, sink = drive.new_run(upstream={"thinker"}), drive.new_run(upstream={"talker"})
    talker.open(run)
    code2wav.open(sink)
    events: list[EngineEvent] = []
    for place in range(len(text) + 1):
        assert talker.feed(run, text[place : place + 1], last=place == len(text))
        while talker.has_work:
            for codes in drive.codes(talker.step()):
                assert code2wav.feed(sink, drive.codes_chunk(codes), last=False)
        while code2wav.has_work:
            events += code2wav.step()
        if place == 20:
            assert any(isinstance(event, EngineOutput) for event in events), "the first clause makes no audio yet"
    assert code2wav.feed(sink, drive.codes_chunk(None), last=True)
    events += drive.step_until_idle(code2wav)[sink]
    assert np.abs(drive.audio(events) - speak(talker, code2wav, text)).max() <= 1e-6


def recording(name: str) -> tuple[np.ndarray, int]:
    from scipy.io import wavfile

    folder = Path(models_dir().parent, "packages", "pytest-audioeval", "pytest_audioeval", "samples", "audio", "en")
    if not folder.is_dir():
        pytest.skip(f"no recordings in {folder} (make setup)")
    with warnings.catch_warnings(action="ignore", category=wavfile.WavFileWarning):  # chunks with notes in them
        rate_hz, audio = wavfile.read(folder / f"{name}.wav")
    assert audio.ndim == 1 and audio.dtype == np.float32
    return audio, rate_hz


def test_recordings_are_understood(transcriber: TranscriberEngine) -> None:
    fox, rate_hz = recording("quick_brown_fox")
    hello, same_hz = recording("hello_world")
    assert rate_hz == same_hz
    got = transcribe(transcriber, [fox, hello], rate_hz)
    assert words(got[0]) == ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    assert "hello" in words(got[1])


def pause(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * SAMPLE_RATE_HZ), np.float32)


def test_word_times_are_those_of_the_words(
    talker: TalkerEngine, code2wav: CodecEngine, transcriber: TranscriberEngine
) -> None:
    """Words of the talker with known pauses between them; every border within a tenth of a second of the truth."""
    said = ["What", "is", "the", "capital", "of", "France"]
    clips = [_cut(speak(talker, code2wav, word.lower())) for word in said]
    pieces, truth, at = [pause(0.7)], [], 0.7
    for audio in clips:
        seconds = len(audio) / SAMPLE_RATE_HZ
        truth.append((at, at + seconds))
        pieces += [audio, pause(0.5)]
        at += seconds + 0.5
    found = timed_words(transcriber, np.concatenate(pieces))
    assert [re.sub(r"\W", "", word.word).lower() for word in found] == [word.lower() for word in said]
    times = [at_s for word in found for at_s in (word.start_s, word.end_s)]
    assert times == sorted(times)
    off = [max(abs(w.start_s - a), abs(w.end_s - b)) for w, (a, b) in zip(found, truth, strict=True)]
    assert max(off) <= 0.1, list(zip(found, truth, strict=True))


def test_words_of_recordings_stay_in_their_recording(transcriber: TranscriberEngine) -> None:
    """Three recordings of a person with long pauses; the second begins in the second window of 30 s."""
    fox, rate_hz = recording("quick_brown_fox")
    hello, _ = recording("hello_world")
    gap = lambda seconds: np.zeros(round(seconds * rate_hz), np.float32)  # noqa: E731
    audio = np.concatenate([gap(1), hello, gap(31), fox, gap(2), hello, gap(1)])
    found = timed_words(transcriber, audio, rate_hz)
    lengths = [len(hello) / rate_hz, len(fox) / rate_hz]
    second, third = 1 + lengths[0] + 31, 1 + lengths[0] + 31 + lengths[1] + 2
    spans = [(1, 1 + lengths[0], 2), (second, second + lengths[1], 9), (third, third + lengths[0], 2)]
    for begin, end, count in spans:
        inside = [w for w in found if begin - 0.05 <= w.start_s < w.end_s <= end + 0.05]
        assert len(inside) == count, (begin, end, found)
    assert len(found) == 13


def _cut(audio: np.ndarray) -> np.ndarray:
    """Without the silence around it."""
    loud = np.flatnonzero(np.abs(audio) > 0.03 * np.abs(audio).max())
    return audio[loud[0] : loud[-1]]


def timed_words(transcriber: TranscriberEngine, audio: np.ndarray, rate_hz: int = SAMPLE_RATE_HZ) -> list[WordTime]:
    pieces = segments(transcriber, audio, rate_hz)
    words = [word for piece in pieces for word in piece.words]
    assert " ".join(word.word for word in words) == "".join(piece.text for piece in pieces)
    return words


def test_counting_is_understood(transcriber: TranscriberEngine) -> None:
    (got,) = transcribe(transcriber, [recording("counting")[0]], recording("counting")[1])
    assert re.sub(r"\D", "", got) == "12345678910", got  # Whisper writes digits
