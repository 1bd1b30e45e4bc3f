# SPDX-License-Identifier: Apache-2.0
"""Audio in requests: rates, invalid samples, and resampling."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kit.expect import accepts
from triton_omni.backends.core.audio import check_rate, check_samples, resampled
from triton_omni.backends.core.errors import BadRequest


@pytest.mark.parametrize("rate_hz", [4_000, 44_100, 192_000])
def test_rates_of_recordings_are_accepted(rate_hz: int) -> None:
    accepts(check_rate, rate_hz, "audio")


@pytest.mark.parametrize("rate_hz", [0, 1, 3_999, 192_001])
def test_other_rates_are_refused(rate_hz: int) -> None:
    with pytest.raises(BadRequest, match=str(rate_hz)) as caught:
        check_rate(rate_hz, "messages[0]")
    assert caught.value.where == "messages[0]"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 4.5, -32768.0])
def test_one_bad_sample_is_enough(bad: float) -> None:
    samples = np.zeros(100, np.float32)
    check_samples(samples, "audio")
    samples[57] = bad
    with pytest.raises(BadRequest, match="between -1 and 1") as caught:
        check_samples(samples, "audio")
    assert caught.value.where == "audio"


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 16_000, 44_100, 44_101, 48_000])
def test_a_tone_stays_a_tone(rate_hz: int) -> None:
    """Also at rates without a common divisor, whose filter must not grow with them."""
    tone = np.sin(2 * np.pi * 440 * np.arange(rate_hz) / rate_hz).astype(np.float32)
    made = resampled(tone, rate_hz, 16_000)
    assert made.dtype == np.float32 and made is not tone and abs(len(made) - 16_000) <= 1
    wanted = np.sin(2 * np.pi * 440 * np.arange(len(made)) / 16_000)
    assert np.abs(made - wanted)[500:-500].max() < 0.01
