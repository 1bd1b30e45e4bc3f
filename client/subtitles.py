# SPDX-License-Identifier: Apache-2.0
"""Transcript segments with times → SubRip and WebVTT files. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phrase:
    """One segment of a transcript; times in seconds."""

    start_s: float
    end_s: float
    text: str


def srt(phrases: Sequence[Phrase]) -> str:
    """SubRip (.srt) text."""
    return "\n".join(f"{i}\n{_span(p, ',')}\n{p.text.strip()}\n" for i, p in enumerate(phrases, 1))


def vtt(phrases: Sequence[Phrase]) -> str:
    """WebVTT (.vtt) text."""
    return "\n".join(["WEBVTT\n", *(f"{_span(p, '.')}\n{p.text.strip()}\n" for p in phrases)])


def _span(phrase: Phrase, point: str) -> str:
    return f"{_clock(phrase.start_s, point)} --> {_clock(phrase.end_s, point)}"


def _clock(at_s: float, point: str) -> str:
    ms = round(at_s * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"
