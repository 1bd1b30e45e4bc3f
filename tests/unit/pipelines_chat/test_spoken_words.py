# SPDX-License-Identifier: Apache-2.0
"""When the embedded voice says each word: from its own durations, as written, in order, and never behind the audio."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("hibari", reason="the engine environment is needed")

import hibari
from hibari.g2p import G2P
from hibari.voices import voice_path

from tests.kit import engine_driver as drive
from triton_omni.backends.codec.engine import CodecEngine, CodecOptions
from triton_omni.backends.core.chunk import Chunk
from triton_omni.backends.core.engine import EngineChunk, EngineFinished, EngineOutput
from triton_omni.backends.core.generate import GenerateRequest, SpeechParams
from triton_omni.backends.core.outputs import AudioPiece, WordsPiece, WordTime
from triton_omni.backends.pipelines.chat.code2wav import BINS, SAMPLE_RATE_HZ, HibariDecoder
from triton_omni.backends.pipelines.chat.rvq import BOOKS, COMPONENTS, ENTRIES, PITCH_BINS, Codebooks
from triton_omni.backends.pipelines.chat.spoken_words import PlacedWord, WordReader, matched, placed, plain
from triton_omni.backends.pipelines.chat.talker import TalkerEngine
from triton_omni.backends.pipelines.chat.voice import DURATIONS, FRAMES_PER_DURATION, VOICE, Voice, with_output

TEXT = "Dr. Smith's e-mail, sent at 7:30 pm, cost $9.99 more. On the 3rd of March 1,250 people came! Didn't they?"
ODD = (
    "Well... no.", "It is 20 °C at 10 km/h on 2024-05-06.", "FBI's U.S. people, and/or 3 1/2.", "#1 & #2 = 12%",
    "HELLO THIS IS LOUD.", "x" * 120, "1" * 60, "a, b; c: d - e", "(what?) 'yes' \"no\"", "ﬁne naïve café", "$7 $8 $9",
    "9" * 40, "https://example.com/a/b?c=d", "the quick brown fox " * 20,
)  # fmt: skip


@pytest.fixture(scope="module")
def voice() -> Voice:
    return Voice()


@pytest.fixture
def talker(voice: Voice) -> TalkerEngine:
    return TalkerEngine("talker", voice, codebooks())


def codebooks() -> Codebooks:
    rng = np.random.default_rng(8)
    return Codebooks(
        mean=np.full(2 * BINS, -3, np.float32),
        basis=rng.standard_normal((COMPONENTS, 2 * BINS), np.float32) / np.float32(COMPONENTS),
        books=rng.standard_normal((BOOKS, ENTRIES, COMPONENTS), np.float32),
        pitch_hz=np.concatenate([[0], np.geomspace(80, 400, PITCH_BINS - 1)]).astype(np.float32),
    )


def asked(text: str, speed: float = 1.0, *outputs: str) -> GenerateRequest:
    return GenerateRequest("speech", input=text, modalities=outputs, speech=SpeechParams(speed=speed))


def spoken(talker: TalkerEngine, text: str, speed: float = 1.0) -> list[WordTime | AudioPiece]:
    """What a client gets, in its order: words one by one, and the audio between them."""
    events = drive.run_with(talker, drive.new_run(asked(text, speed, "audio", "words")))
    assert isinstance(drive.end(events), EngineFinished)
    sent = [event for event in events if isinstance(event, EngineChunk)]
    chunks = [Chunk(b"", "talker", tensors=event.tensors, piece=event.piece) for event in sent]
    run = drive.new_run(upstream={"talker"})
    decoded = drive.run_with(
        CodecEngine("code2wav", HibariDecoder(codebooks()), CodecOptions()), run, [*chunks, drive.codes_chunk(None)]
    )
    found: list[WordTime | AudioPiece] = []
    for event in decoded:
        if isinstance(event, EngineOutput):
            found += event.piece.words if isinstance(event.piece, WordsPiece) else [event.piece]
    return found


def words_of(pieces: list[WordTime | AudioPiece]) -> list[WordTime]:
    return [piece for piece in pieces if isinstance(piece, WordTime)]


def test_one_more_output_and_all_others_bit_equal(voice: Voice) -> None:
    plain_network = hibari.Hibari(VOICE, threads=1)
    network = Path(voice_path(VOICE)).read_bytes()
    assert len(with_output(network, DURATIONS)) - len(network) == 23
    for text in (TEXT, *ODD[:4]):
        for phrase in voice.phrases(text):
            inputs = {
                "ids": np.asarray([plain_network.ids(phrase.phonemes)], np.int64),
                "speed": np.asarray([1.25], np.float32),
            }
            *outputs, durations = voice._hibari.sess.run(None, inputs)
            for ours, theirs in zip(outputs, plain_network.sess.run(None, inputs), strict=True):
                assert ours.tobytes() == theirs.tobytes()
            assert durations.sum() * FRAMES_PER_DURATION == outputs[0].shape[-1]
            assert len(durations) == inputs["ids"].shape[1]


def test_the_reader_reads_as_hibari_does() -> None:
    reader, own = WordReader(), G2P()
    for text in (TEXT, *ODD[:5], "", "...", "🎉", "a  b", "Mr. X's 3rd"):
        assert reader(text) == own(text)


@pytest.mark.parametrize(
    ("clause", "read"),
    [
        ("Dr. Smith came at 7:30 pm.", {"Dr.": "dˈɑktəɹ", "7:30": "sˈɛvən θˈɜɹɾi", "pm.": "pˌiˈɛm"}),
        ("They paid $9.99 for #1.", {"$9.99": "nˈIn dˈɑləɹz ænd nˈIndi nˈIn sˈɛnts", "#1.": "nˈʌmbəɹ wˈʌn"}),
        ("It is 20 °C now.", {"20": "twˈɛnti", "°C": "dəɡɹˈiz sˈɛlsiəs", "now.": "nˈW"}),
    ],
)
def test_a_written_word_has_all_that_is_read_for_it(voice: Voice, clause: str, read: dict[str, str]) -> None:
    (phrase,) = voice.phrases(clause)
    said = {word.text: phrase.phonemes[word.begin : word.end].replace("T", "ɾ") for word in phrase.words}
    assert list(said) == [word for word in clause.split() if plain(word)]
    assert {word: said[word] for word in read} == read


def test_words_that_were_not_read_have_a_place_and_no_length() -> None:
    assert matched(["one", "lost", "two"], ["one", "two"]) == [("one", 0, 1), ("lost", 1, 1), ("two", 1, 2)]
    assert matched([], ["number"]) == []
    assert matched(["#1"], ["number", "1"]) == [("#1", 0, 2)]
    assert matched(["7"], ["7", "again"]) == [("7", 0, 2)]
    read = [("wˈʌn tˈu", [PlacedWord("one", 0, 4), PlacedWord("two", 5, 8)])]
    assert placed("one lost two", read, ["wˈʌn", "tˈu"]) == [
        [PlacedWord("one", 0, 4)], [PlacedWord("lost", 0, 0), PlacedWord("two", 0, 3)],
    ]  # fmt: skip
    assert placed("one two lost", read, ["wˈʌn tˈu"])[0][-1] == PlacedWord("lost", 8, 8)
    assert placed("one", [], []) == []


@pytest.mark.parametrize("speed", [0.5, 1.0, 3.0])
def test_words_are_as_written_rising_inside_and_no_later_than_their_audio(talker: TalkerEngine, speed: float) -> None:
    pieces = spoken(talker, TEXT, speed)
    words = words_of(pieces)
    assert [word.word for word in words] == TEXT.split()
    total_s = sum(piece.samples for piece in pieces if isinstance(piece, AudioPiece)) / SAMPLE_RATE_HZ
    assert words[0].start_s > 0 and words[-1].end_s <= total_s
    assert words[-1].end_s > 0.85 * total_s, "the last word ends near the end of the audio"
    before_s = 0.0
    for word in words:
        assert before_s <= word.start_s < word.end_s
        before_s = word.end_s
    played_s = 0.0
    for piece in pieces:
        if isinstance(piece, AudioPiece):
            played_s += piece.samples / SAMPLE_RATE_HZ
        else:
            assert piece.start_s >= played_s - 1e-6, "the word came behind the audio that it describes"


def test_any_text_keeps_its_words_in_order(voice: Voice) -> None:
    rng = random.Random(5)
    signs = "abcdefgh ABC 0123456789 .,;:!?-'\"$%&#/() éü°€ "
    made = ["".join(rng.choice(signs) for _ in range(rng.randint(1, 160))) + " end" for _ in range(40)]
    for text in (*ODD, *made):
        phrases = voice.phrases(text, rng.choice([0.25, 1.0, 2.5]))
        assert [word.text for phrase in phrases for word in phrase.words] == [w for w in text.split() if plain(w)]
        for phrase in phrases:
            places = [at for word in phrase.words for at in (word.begin, word.end)]
            assert places == sorted(places), text
            assert all(0 <= at <= len(phrase.phonemes) for at in places)


def test_nothing_is_sent_to_those_who_did_not_ask(talker: TalkerEngine) -> None:
    plain_run, timed = drive.new_run(asked(TEXT)), drive.new_run(asked(TEXT, 1.0, "audio", "words"))
    without = [e for e in drive.run_with(talker, plain_run) if isinstance(e, EngineChunk)]
    with_words = [e for e in drive.run_with(talker, timed) if isinstance(e, EngineChunk)]
    assert all(event.piece is None for event in without)
    assert all(isinstance(event.piece, WordsPiece) for event in with_words)
    assert np.concatenate(drive.codes(without)).tobytes() == np.concatenate(drive.codes(with_words)).tobytes()


def test_joined_words_are_all_words() -> None:
    first, second = WordTime("a", 0.1, 0.2), WordTime("b", 0.3, 0.4)
    assert WordsPiece.join([WordsPiece((first,)), WordsPiece((second,))]) == WordsPiece((first, second))
    assert WordsPiece.join([]) == WordsPiece()
