# SPDX-License-Identifier: Apache-2.0
"""Audio parts of a request: slices, limits, sample rates, windows."""

from __future__ import annotations

import numpy as np
import pytest

from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, Part
from triton_omni.backends.pipelines.chat.audio_windows import (
    CUT_WITHIN_SAMPLES,
    SAMPLE_RATE_HZ,
    WINDOW_SAMPLES,
    Clip,
    clips_of,
    leading_silence,
    quietest,
    quietest_near_the_end,
)


def audio(samples) -> dict[str, Tensor]:
    return {"audio": Tensor.of("audio", np.asarray(samples, np.float32))}


def asking(*parts: Part) -> GenerateRequest:
    return GenerateRequest(messages=(Message("user", parts),))


def part(offset: int, length: int, rate: int = SAMPLE_RATE_HZ) -> Part:
    return Part("audio", offset=offset, length=length, sample_rate=rate)


def test_parts_are_slices_in_the_order_of_the_messages() -> None:
    request = GenerateRequest(
        messages=(
            Message("user", (part(6, 2), Part("text", "hm"), part(0, 3, 8000))),
            Message("assistant", "yes"),
            Message("user", (part(3, 3),)),
        )
    )
    clips = clips_of(request, audio([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]), 10.0)
    assert [clip.rate_hz for clip in clips] == [16000, 8000, 16000]
    np.testing.assert_array_equal(np.concatenate([c.samples for c in clips]), np.float32([6, 7, 0, 1, 2, 3, 4, 5]) / 10)


def test_samples_may_lie_in_any_buffer() -> None:
    samples = np.linspace(-1, 1, 9, dtype=np.float32)
    tensor = Tensor(Tensor.of("audio", samples).spec, memoryview(samples.tobytes()))
    (clip,) = clips_of(asking(part(2, 5)), {"audio": tensor}, 1.0)
    np.testing.assert_array_equal(clip.samples, samples[2:7])


@pytest.mark.parametrize(
    ("parts", "samples", "field"),
    [
        ((part(0, 0),), [0.1] * 4, "messages[0].content[0]"),
        ((part(0, 5),), [0.1] * 4, "messages[0].content[0]"),
        ((part(4, 1),), [0.1] * 4, "messages[0].content[0]"),
        ((part(0, 1),), [], "messages[0].content[0]"),
        ((part(0, 4), part(0, 4, 3999)), [0.1] * 4, "messages[0].content[1].sample_rate"),
        ((part(0, 4, 384_000),), [0.1] * 4, "messages[0].content[0].sample_rate"),
        ((part(0, 4),), [0.1, np.nan, 0.1, 0.1], "audio"),
        ((part(0, 4),), [0.1, np.inf, 0.1, 0.1], "audio"),
        ((part(0, 4),), [0.1, -20_000.0, 0.1, 0.1], "audio"),
        ((part(0, 16_000), part(0, 16_001)), np.zeros(20_000), "audio"),
        ((), [0.1], "messages"),
    ],
)
def test_what_cannot_be_transcribed_is_refused_by_field(parts, samples, field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        clips_of(asking(*parts), audio(samples), 2.0)
    assert refused.value.where == field


def test_a_bad_sample_outside_the_parts_is_ignored() -> None:
    assert len(clips_of(asking(part(0, 2)), audio([0.1, 0.2, np.nan]), 1.0)) == 1


def test_missing_tensor_is_refused() -> None:
    with pytest.raises(BadRequest, match="input tensor"):
        clips_of(asking(part(0, 1)), {}, 1.0)


@pytest.mark.parametrize("rate_hz", [4000, 8000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000, 47_999, 192_000])
def test_a_tone_keeps_pitch_level_and_length_at_every_rate(rate_hz: int) -> None:
    hz, seconds = 440, 2
    tone = 0.5 * np.sin(2 * np.pi * hz * np.arange(seconds * rate_hz) / rate_hz).astype(np.float32)
    audio = Clip(tone, rate_hz).resampled()
    assert audio.dtype == np.float32
    assert abs(len(audio) - seconds * SAMPLE_RATE_HZ) <= 4
    spectrum = np.abs(np.fft.rfft(audio * np.hanning(len(audio))))
    assert abs(np.argmax(spectrum) * SAMPLE_RATE_HZ / len(audio) - hz) <= 1
    assert np.sqrt(np.mean(audio[1600:-1600] ** 2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_a_full_window_is_cut_near_its_end(seed: int) -> None:
    window = np.random.default_rng(seed).standard_normal(WINDOW_SAMPLES).astype(np.float32)
    assert WINDOW_SAMPLES - CUT_WITHIN_SAMPLES <= quietest_near_the_end(window) <= WINDOW_SAMPLES


def test_a_window_ends_in_the_pause() -> None:
    window = np.random.default_rng(1).standard_normal(WINDOW_SAMPLES).astype(np.float32)
    pause = slice(int(27.2 * SAMPLE_RATE_HZ), int(27.6 * SAMPLE_RATE_HZ))
    window[pause] = 0
    assert pause.start < quietest_near_the_end(window) < pause.stop
    assert pause.start < quietest(window, pause.start, SAMPLE_RATE_HZ // 4) < pause.stop


def test_quietest_stays_near_what_it_is_asked_for() -> None:
    silence = np.zeros(SAMPLE_RATE_HZ, np.float32)
    assert quietest(silence, 4000, 1000) == 4000, "of equals the nearest"
    assert quietest(silence[:300], 300, 4000) == 300


def test_leading_silence_leaves_half_a_second_before_the_speech() -> None:
    assert leading_silence(np.zeros(500, np.float32)) == 500
    samples = np.concatenate([np.zeros(20_000), [0.1], np.zeros(10)]).astype(np.float32)
    assert leading_silence(samples) == 12_000 and leading_silence(samples[15_000:]) == 0
