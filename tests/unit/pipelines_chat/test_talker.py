# SPDX-License-Identifier: Apache-2.0
"""The talker with hibari's own network: a chunk per clause, the same codes however the text came, turns, ends."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

pytest.importorskip("hibari", reason="the engine environment is needed")

from tests.kit import engine_driver as drive
from triton_omni.backends.core.engine import EngineChunk, EngineEvent, EngineFailed, EngineFinished, Run
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, SpeechParams
from triton_omni.backends.pipelines.chat.clauses import estimated_speech_s
from triton_omni.backends.pipelines.chat.rvq import BOOKS, CODES, COMPONENTS, ENTRIES, PITCH_BINS, Codebooks
from triton_omni.backends.pipelines.chat.talker import QUEUE_CLAUSES, TalkerEngine
from triton_omni.backends.pipelines.chat.voice import BINS, LONGEST_WORD, MAX_PIECE_S, Frames, Voice, shortened

FRAMES_PER_S = 80
TEXT = "Hello there. Dr. Smith has 3.14 apples, and you? 🎉 No stop at the end"


@pytest.fixture(scope="module")
def voice() -> Voice:
    return Voice()


@pytest.fixture
def talker(voice: Voice) -> TalkerEngine:
    rng = np.random.default_rng(3)
    basis = np.linalg.qr(rng.standard_normal((2 * BINS, COMPONENTS)))[0].T.astype(np.float32)
    books = rng.standard_normal((BOOKS, ENTRIES, COMPONENTS), np.float32) * np.float32(10)
    pitch_hz = np.concatenate([[0], np.geomspace(80, 400, PITCH_BINS - 1)]).astype(np.float32)
    return TalkerEngine("talker", voice, Codebooks(np.full(2 * BINS, -4, np.float32), basis, books, pitch_hz))


def fed_run() -> Run:
    return drive.new_run(upstream={"thinker"})


def speech_run(text: str, speed: float = 1.0) -> Run:
    return drive.new_run(GenerateRequest(operation="speech", input=text, speech=SpeechParams(speed=speed)))


def phonemes(voice: Voice, text: str) -> list[str]:
    return [phrase.phonemes for phrase in voice.phrases(text)]


def spoken(talker: TalkerEngine, pieces: list[str]) -> list[np.ndarray]:
    return drive.codes(drive.run_with(talker, fed_run(), pieces))


def test_a_chunk_per_clause_and_one_end(talker: TalkerEngine) -> None:
    events = drive.run_with(talker, speech_run(TEXT))
    chunks = drive.codes(events)
    assert len(chunks) == 3
    assert all(codes.dtype == np.int16 and codes.shape[1] == CODES and len(codes) > 40 for codes in chunks)
    end = drive.end(events)
    assert isinstance(end, EngineFinished) and end.usage["audio_frames"] == sum(map(len, chunks))


@pytest.mark.parametrize("longest_delta", [1, 4, 20])
def test_streamed_text_gives_the_same_bytes(talker: TalkerEngine, longest_delta: int) -> None:
    whole = np.concatenate(drive.codes(drive.run_with(talker, speech_run(TEXT))))
    rng, rest, pieces = random.Random(longest_delta), TEXT, []
    while rest:
        size = rng.randint(1, longest_delta)
        pieces.append(rest[:size])
        rest = rest[size:]
    assert np.concatenate(spoken(talker, [*pieces, ""])).tobytes() == whole.tobytes()


def test_first_clause_leaves_while_the_text_goes_on(talker: TalkerEngine) -> None:
    run = fed_run()
    talker.open(run)
    assert talker.feed(run, "Hello there. How", last=False)
    (event,) = talker.step()
    assert isinstance(event, EngineChunk) and not talker.has_work
    assert talker.feed(run, " are you", last=True)
    assert isinstance(drive.end(drive.step_until_idle(talker)[run]), EngineFinished)


@pytest.mark.parametrize("text", ["", " \n", "🎉🎉", "**", "---", "你好"])
def test_nothing_to_say_is_silence_and_a_proper_end(talker: TalkerEngine, text: str) -> None:
    events = drive.run_with(talker, fed_run(), [text, ""])
    assert not drive.codes(events)
    assert isinstance(drive.end(events), EngineFinished)


@pytest.mark.parametrize(
    "text", ["🎉🎉", "...!?", "你好，世界。", "مرحبا", "Привет, мир!", "ελλάδα", "हिन्दी", "가나다"]
)
def test_a_text_that_cannot_be_read_is_refused_where_it_is_all_there_is(talker: TalkerEngine, text: str) -> None:
    failed = drive.end(drive.run_with(talker, speech_run(text)))
    assert isinstance(failed, EngineFailed) and isinstance(failed.error, BadRequest) and failed.error.where == "input"
    assert isinstance(drive.end(drive.run_with(talker, speech_run(f"{text} Hello."))), EngineFinished)
    assert not talker.has_work


def test_long_words_are_read_in_pieces(voice: Voice) -> None:
    """hibari's reader would take 8 s for the first one, and hold up everyone else's speech."""
    for word in ("a1" * 150, "1/" * 150, "https://example.com/" + "path/" * 40, "-" * 300, "x" * 51):
        pieces = shortened(f"say {word} now").split()
        assert max(map(len, pieces)) <= LONGEST_WORD
        assert "".join(pieces[1:-1]) == word
    assert shortened(TEXT) == TEXT
    began = time.thread_time()
    assert voice.phrases("a1" * 150)
    assert time.thread_time() - began < 3


def test_runs_take_turns(talker: TalkerEngine) -> None:
    runs = [speech_run("One is here. Two is there. Three is gone.") for _ in range(3)]
    for run in runs:
        talker.open(run)
    order: list[Run] = []
    while talker.has_work:
        order += [event.run for event in talker.step() if isinstance(event, EngineChunk)]
    assert order == runs * 3


LONG_CLAUSE = "the quick brown fox jumps over the lazy dog and runs away from the bear in the north " * 2


@pytest.mark.parametrize("text", [f"One is here. {LONG_CLAUSE}.", LONG_CLAUSE], ids=["later phrase", "first phrase"])
def test_a_new_run_speaks_while_a_long_phrase_of_another_is_spoken(
    talker: TalkerEngine, voice: Voice, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Also where the long one is held in its thread; and its speech is the same as alone."""
    alone = drive.codes(drive.run_with(talker, speech_run(text)))
    begun, go_on = threading.Event(), threading.Event()
    frames = voice.frames

    def held(phonemes: str, speed: float) -> Frames:
        if len(phonemes) > 100:
            begun.set()
            assert go_on.wait(30)
        return frames(phonemes, speed)

    monkeypatch.setattr(voice, "frames", held)
    long, late = speech_run(text), speech_run("Four is new.")
    talker.open(long)
    before: list[EngineEvent] = []
    while not begun.is_set():
        before += talker.step()
    talker.open(late)
    (chunk, end) = talker.step()
    assert isinstance(chunk, EngineChunk) and chunk.run is end.run is late and isinstance(end, EngineFinished)
    go_on.set()
    after = drive.step_until_idle(talker)[long]
    assert all(map(np.array_equal, drive.codes(before + after), alone)) and len(drive.codes(before + after)) == len(
        alone
    )


def test_a_run_that_is_stopped_while_it_is_spoken_is_silent(
    talker: TalkerEngine, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    frames = voice.frames

    def held(phonemes: str, speed: float) -> Frames:
        begun.set()
        assert go_on.wait(30)
        return frames(phonemes, speed)

    monkeypatch.setattr(voice, "frames", held)
    run = speech_run(LONG_CLAUSE)
    talker.open(run)
    while not begun.is_set():
        assert talker.step() == ()
    talker.stop(run)
    go_on.set()
    assert drive.step_until_idle(talker) == {} and not talker.has_work


@pytest.mark.parametrize("speed", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("text", ["1" * 300, "9 " * 140, "W" * 300, "$1,234,567.89 " * 20, "the quick brown fox " * 14])
def test_no_step_speaks_for_long(talker: TalkerEngine, text: str, speed: float) -> None:
    """Others wait for the step; what a text costs is not its length but what its digits and signs are read as."""
    chunks = drive.codes(drive.run_with(talker, speech_run(text, speed)))
    assert max(map(len, chunks)) <= 1.25 * MAX_PIECE_S * FRAMES_PER_S


@pytest.mark.parametrize(
    "text", ["1" * 300, "9 " * 140, "WXZ " * 70, "a % & @ # + = " * 20, "the quick brown fox " * 14]
)
def test_the_estimate_of_a_texts_length_is_not_far_too_low(talker: TalkerEngine, text: str) -> None:
    frames = sum(map(len, drive.codes(drive.run_with(talker, speech_run(text)))))
    assert 0.95 * frames / FRAMES_PER_S <= estimated_speech_s(text) <= 3 * frames / FRAMES_PER_S


def test_a_clause_in_capitals_is_read_as_words(voice: Voice) -> None:
    assert "THIS" not in voice._without_capitals("HELLO THIS IS ALL CAPS.")
    read = phonemes(voice, "hello this is all caps. it is me and he is there.")
    assert phonemes(voice, "HELLO THIS IS ALL CAPS. IT IS ME AND HE IS THERE.") == read


@pytest.mark.parametrize("text", ["FBI", "THE FBI AND THE CIA ARE HERE.", "The US is big.", "I", "NASA", "It is US."])
def test_abbreviations_stay_spelled(voice: Voice, text: str) -> None:
    kept = [word for word in text.strip(".").split() if word in ("FBI", "CIA", "US", "I")]
    assert all(word in voice._without_capitals(text).strip(".").split() for word in kept)
    assert phonemes(voice, "THE FBI IS HERE.") == phonemes(voice, "the FBI is here.")


def test_blocked_run_waits_and_others_go_on(talker: TalkerEngine) -> None:
    slow, other = speech_run("One is here. Two is there."), speech_run("Three is gone.")
    for run in (slow, other):
        talker.open(run)
    slow.blocked = True
    events = drive.step_until_idle(talker)
    assert slow not in events and isinstance(drive.end(events[other]), EngineFinished)
    slow.blocked = False
    assert len(drive.codes(drive.step_until_idle(talker)[slow])) == 2


def test_too_many_clauses_wait_outside(talker: TalkerEngine) -> None:
    run = fed_run()
    talker.open(run)
    assert talker.feed(run, "Yes, it is so. " * QUEUE_CLAUSES + " And", last=False)
    assert not talker.feed(run, " more.", last=True)
    talker.step()
    assert talker.feed(run, " more.", last=True)


def test_stopped_run_is_silent(talker: TalkerEngine) -> None:
    run = speech_run(TEXT)
    talker.open(run)
    talker.step()
    talker.stop(run)
    assert not talker.has_work and not talker.step()


@pytest.mark.parametrize(("speed", "factor"), [(0.25, 4.0), (0.5, 2.0), (2.0, 0.5), (4.0, 0.25)])
def test_speed_scales_the_length(talker: TalkerEngine, speed: float, factor: float) -> None:
    def length(at: float) -> int:
        events: list[EngineEvent] = drive.run_with(
            talker, speech_run("The quick brown fox jumps over the lazy dog.", at)
        )
        return sum(map(len, drive.codes(events)))

    assert length(speed) == pytest.approx(length(1.0) * factor, rel=0.12)


@pytest.mark.parametrize("text", ["9" * 40, f"It costs ${'7' * 60}.", "i̇$①", f"{'1' * 37}th"])
def test_numbers_beyond_the_reader_are_spelled(talker: TalkerEngine, text: str) -> None:
    events = drive.run_with(talker, speech_run(text))
    assert isinstance(drive.end(events), EngineFinished)
    assert sum(map(len, drive.codes(events))) > 40


def test_an_unreadable_clause_ends_its_own_run_only(
    talker: TalkerEngine, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = speech_run(TEXT)
    talker.open(other)
    with monkeypatch.context() as patch:
        patch.setattr(voice, "phrases", lambda *_: [].pop())
        failed = talker.step()
    assert [type(event) for event in failed] == [EngineFailed] and not talker.has_work
    assert isinstance(drive.end(drive.run_with(talker, speech_run(TEXT))), EngineFinished)
