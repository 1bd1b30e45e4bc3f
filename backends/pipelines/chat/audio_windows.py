# SPDX-License-Identifier: Apache-2.0
"""Audio of a request, made ready for the transcriber: checked, resampled, cut into windows at quiet places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from triton_omni.backends.core.audio import check_rate, check_samples, resampled
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest

SAMPLE_RATE_HZ = 16_000
WINDOW_SAMPLES = 30 * SAMPLE_RATE_HZ
CUT_WITHIN_SAMPLES = 5 * SAMPLE_RATE_HZ  # a cut lies in the last five seconds of a window, where it is quietest
QUIET_SAMPLES = SAMPLE_RATE_HZ // 10
SHORT_QUIET_SAMPLES = SAMPLE_RATE_HZ // 20
DIGITAL_SILENCE, LEAD_SAMPLES = 3e-4, SAMPLE_RATE_HZ // 2  # 10 units of 16-bit audio
TINY_POWER = 1e-6


@dataclass(frozen=True, slots=True)
class Clip:
    """One audio part of a request: its samples and rate as they came."""

    samples: np.ndarray
    rate_hz: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate_hz

    def resampled(self) -> np.ndarray:
        """The samples at SAMPLE_RATE_HZ."""
        return resampled(self.samples, self.rate_hz, SAMPLE_RATE_HZ)


def clips_of(request: GenerateRequest, inputs: Mapping[str, Tensor], max_audio_s: float) -> list[Clip]:
    """The audio parts in order; raises BadRequest, naming the field, for what cannot be transcribed."""
    parts = [
        (part, f"messages[{i}].content[{j}]")
        for i, message in enumerate(request.messages)
        for j, part in enumerate(message.parts)
        if part.type == "audio"
    ]
    tensor = inputs.get("audio")
    if not parts:
        raise BadRequest("no message has a part of type 'audio'", "messages")
    if tensor is None:
        raise BadRequest("a part of type 'audio' needs the input tensor 'audio'", "audio")
    samples = np.frombuffer(tensor.data, np.float32) if tensor.spec.nbytes else np.zeros(0, np.float32)
    clips: list[Clip] = []
    for part, where in parts:
        check_rate(part.sample_rate, f"{where}.sample_rate")
        if not 0 < part.length <= len(samples) - part.offset:
            raise BadRequest(f"part must be a slice of the {len(samples)} samples sent", where)
        clips.append(Clip(samples[part.offset : part.offset + part.length], part.sample_rate))
    seconds = sum(clip.seconds for clip in clips)
    if seconds > max_audio_s:
        raise BadRequest(f"audio must be at most {max_audio_s:g} s (got {seconds:.1f})", "audio")
    for clip in clips:
        check_samples(clip.samples, "audio")
    return clips


def leading_silence(samples: np.ndarray) -> int:
    """How many samples at the start are digital silence; LEAD_SAMPLES before the rest are not counted."""
    is_loud = np.abs(samples) > DIGITAL_SILENCE
    return max(0, int(np.argmax(is_loud)) - LEAD_SAMPLES) if is_loud.any() else len(samples)


def quietest_near_the_end(window: np.ndarray) -> int:
    """Where to cut a full window: the middle of its quietest tenth of a second near the end."""
    tail = window[-CUT_WITHIN_SAMPLES:].reshape(-1, QUIET_SAMPLES)
    power = np.square(tail, dtype=np.float64).sum(1)
    index = len(power) - 1 - int(np.argmin(power[::-1]))  # the latest of equals: fewer windows
    return len(window) - CUT_WITHIN_SAMPLES + index * QUIET_SAMPLES + QUIET_SAMPLES // 2


def quietest(samples: np.ndarray, at: int, radius: int) -> int:
    """The middle of the quietest SHORT_QUIET_SAMPLES within `radius` of `at`; the nearest one of equals."""
    begin = max(0, at - radius)
    power = np.square(samples[begin : at + radius], dtype=np.float64)
    if len(power) <= SHORT_QUIET_SAMPLES:
        return min(at, len(samples))
    sums = np.convolve(power, np.ones(SHORT_QUIET_SAMPLES), "valid")
    middles = begin + SHORT_QUIET_SAMPLES // 2 + np.arange(len(sums))
    equal = np.flatnonzero(sums <= sums.min() + TINY_POWER)
    return int(middles[equal[np.argmin(np.abs(middles[equal] - at))]])
