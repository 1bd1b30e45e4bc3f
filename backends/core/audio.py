# SPDX-License-Identifier: Apache-2.0
"""Audio of requests: what is refused, and resampling. Imports no more than a stub has."""

from __future__ import annotations

from fractions import Fraction
from typing import cast

import numpy as np

from triton_omni.backends.core.errors import BadRequest

LOWEST_RATE_HZ, HIGHEST_RATE_HZ = 4_000, 192_000  # resampling from a few Hz would multiply the size by thousands
LOUDEST = 4.0  # resampling may overshoot 1; 16-bit numbers sent as they are go far beyond
MAX_FILTER = 1_000  # odd rates are met within half a thousandth by a fraction of small numbers


def check_rate(rate_hz: int, where: str) -> None:
    """Raise BadRequest for a rate outside these bounds."""
    if not LOWEST_RATE_HZ <= rate_hz <= HIGHEST_RATE_HZ:
        bounds = f"from {LOWEST_RATE_HZ} to {HIGHEST_RATE_HZ} Hz"
        raise BadRequest(f"sample rate must be {bounds} (got {rate_hz})", where)


def check_samples(samples: np.ndarray, where: str) -> None:
    """Raise BadRequest for samples (at least one) that are not finite or far above 1."""
    loudest = float(np.abs(samples).max())  # NaN if any sample is
    if not loudest <= LOUDEST:
        raise BadRequest(f"samples must be between -1 and 1 (got {loudest})", where)


def resampled(samples: np.ndarray, rate_hz: int, wanted_hz: int) -> np.ndarray:
    """A copy of samples (n,) at another rate, float32."""
    if rate_hz == wanted_hz:
        return samples.astype(np.float32)
    from scipy.signal import resample_poly  # pyright: ignore[reportMissingTypeStubs,reportUnknownVariableType]

    ratio = Fraction(wanted_hz, rate_hz).limit_denominator(MAX_FILTER)
    out = cast(np.ndarray, resample_poly(samples, ratio.numerator, ratio.denominator))
    return out.astype(np.float32)
