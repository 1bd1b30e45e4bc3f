# SPDX-License-Identifier: Apache-2.0
"""Audio from codes: equal to hibari's own synthesis, the same however it is cut, no run audible in another.

The codebooks are random, of the real sizes; no weights are needed.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the engine environment is needed")

from tests.kit import engine_driver as drive
from triton_omni.backends.codec.decoder import Window
from triton_omni.backends.codec.engine import CodecEngine, CodecOptions
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.pipelines.chat.code2wav import BINS, HibariDecoder, Phase, pitch_curve, pulse_train
from triton_omni.backends.pipelines.chat.rvq import BOOKS, CODES, COMPONENTS, ENTRIES, PITCH_BINS, Codebooks

CLOSE = 1e-6


@pytest.fixture(scope="module")
def decoder() -> HibariDecoder:
    rng = np.random.default_rng(5)
    spread = rng.standard_normal((COMPONENTS, 2 * BINS), np.float32) / np.float32(COMPONENTS)
    return HibariDecoder(
        Codebooks(
            mean=np.full(2 * BINS, -3, np.float32),
            basis=spread,
            books=rng.standard_normal((BOOKS, ENTRIES, COMPONENTS), np.float32),
            pitch_hz=np.concatenate([[0], np.geomspace(80, 400, PITCH_BINS - 1)]).astype(np.float32),
        )
    )


def speech(frames: int, seed: int = 0) -> np.ndarray:
    """Codes with voiced and unvoiced stretches."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, ENTRIES, (frames, CODES)).astype(np.int16)
    voiced = np.repeat(rng.integers(0, 2, frames // 7 + 1), 7)[:frames]
    codes[:, BOOKS] = np.where(voiced, rng.integers(1, PITCH_BINS, frames), 0)
    return codes


def whole(decoder: HibariDecoder, codes: np.ndarray) -> np.ndarray:
    return decoder.decode([Window(codes, 0, 0, len(codes), True, decoder.start())])[0]


def chunked(decoder: HibariDecoder, codes: np.ndarray, first: int, later: int) -> np.ndarray:
    engine = CodecEngine("code2wav", decoder, CodecOptions(first_chunk_frames=first, chunk_frames=later))
    return drive.audio(drive.run_with(engine, drive.new_run(upstream={"talker"}), [drive.codes_chunk(codes)]))


@pytest.mark.parametrize(("first", "later"), [(10, 25), (1, 1), (3, 4), (4, 5), (5, 2), (7, 50), (25, 10)])
def test_cutting_changes_nothing(decoder: HibariDecoder, first: int, later: int) -> None:
    codes = speech(173)
    expected = whole(decoder, codes)
    got = chunked(decoder, codes, first, later)
    assert got.shape == expected.shape == (173 * 300,)
    assert np.abs(expected).max() > 0.01, "the audio is silence and proves nothing"
    assert np.abs(got - expected).max() <= CLOSE


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 11, 14, 15])
def test_short_runs(decoder: HibariDecoder, frames: int) -> None:
    codes = speech(frames, seed=frames)
    expected = whole(decoder, codes)
    assert expected.shape == (frames * 300,) and np.isfinite(expected).all()
    assert np.abs(chunked(decoder, codes, 2, 3) - expected).max() <= CLOSE


def test_less_context_changes_the_audio(decoder: HibariDecoder) -> None:
    """The context is needed: with one frame less behind, a cut makes a difference."""
    codes = speech(60)
    expected = whole(decoder, codes)[: 20 * 300]
    short = decoder.decode([Window(codes[:23], 0, 0, 20, False, decoder.start())])[0]
    enough = decoder.decode([Window(codes[:24], 0, 0, 20, False, decoder.start())])[0]
    assert np.abs(enough - expected).max() <= CLOSE
    assert np.abs(short - expected).max() > 10 * CLOSE


def test_runs_of_one_batch_do_not_hear_each_other(decoder: HibariDecoder) -> None:
    runs = [speech(frames, seed=frames) for frames in (3, 40, 17, 29)]
    together = decoder.decode([Window(codes, 0, 0, len(codes), True, decoder.start()) for codes in runs])
    for codes, got in zip(runs, together, strict=True):
        assert np.abs(got - whole(decoder, codes)).max() <= CLOSE


@pytest.mark.bytes_exact
def test_a_run_gives_the_same_bytes_alone_and_beside_others(decoder: HibariDecoder) -> None:
    runs = [speech(frames, seed=frames) for frames in (1, 2, 3, 5, 8, 13, 31, 32, 33, 64, 101)]
    alone = [whole(decoder, codes).tobytes() for codes in runs]
    for first in range(0, len(runs), 3):
        order = [*range(first, len(runs)), *range(first)]
        together = decoder.decode([Window(runs[i], 0, 0, len(runs[i]), True, decoder.start()) for i in order])
        assert [audio.tobytes() for audio in together] == [alone[i] for i in order]


def test_equal_to_hibaris_synthesis(decoder: HibariDecoder) -> None:
    dsp = pytest.importorskip("hibari.dsp", reason="hibari-tts is not installed")
    codes = speech(90)
    spectrum, pitch_hz = decoder._codebooks.decode(codes)

    class OurNoise:
        def standard_normal(self, shape: tuple[int, int], dtype: type) -> np.ndarray:
            return np.ascontiguousarray(decoder._noise[: shape[1] // 2].T).view(np.float32)

    silent, still = np.full((BINS, 90), -60, np.float32), np.zeros((BINS, 90), np.float32)
    harmonic, noise = spectrum.T[:BINS].copy(), spectrum.T[BINS:].copy()
    expected = dsp.synth(harmonic, still, noise, silent, still, pitch_hz, OurNoise())
    assert np.abs(whole(decoder, codes) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_phase_goes_on_over_a_cut() -> None:
    curve = pitch_curve(np.full(12, 200, np.float32))
    at_once = pulse_train(curve, Phase(), 0)
    phase = Phase()
    first = pulse_train(curve[:1500], phase, 1500)
    second = pulse_train(curve[1500:], phase, 0)
    np.testing.assert_allclose(np.concatenate([first, second]), at_once, atol=1e-3)
    beats = np.flatnonzero(at_once > 0.9 * at_once.max())
    assert abs(np.diff(beats).mean() - 120) < 1, "200 Hz is a pulse every 120 samples"


@pytest.mark.parametrize("bad", [-1, ENTRIES])
def test_codes_outside_the_books_are_refused(decoder: HibariDecoder, bad: int) -> None:
    codes = speech(3)
    codes[1, 2] = bad
    with pytest.raises(BadRequest):
        decoder.check(codes)


def test_codes_round_trip(decoder: HibariDecoder) -> None:
    books = decoder._codebooks
    pitch_hz = np.array([0, 30, 80, 200, 500], np.float32)
    codes = books.encode(np.zeros((5, 2 * BINS), np.float32), pitch_hz)
    assert codes.dtype == np.int16 and codes.shape == (5, CODES)
    assert codes[:, BOOKS].tolist()[:3] == [0, 0, 1] and codes[4, BOOKS] == PITCH_BINS - 1
    assert abs(books.decode(codes)[1][3] - 200) < 3
