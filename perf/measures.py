# SPDX-License-Identifier: Apache-2.0
"""What a client felt, computed from the times at which its pieces came. Pure functions; seconds and milliseconds."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CONTINUOUS_S = 0.1  # a pause up to this is not noticed; the bound that vLLM-Omni's reports use


@dataclass(frozen=True)
class Piece:
    """One response: when it came, of which output, and how long its audio lasts."""

    at_s: float
    output: str
    audio_s: float = 0.0


@dataclass(frozen=True)
class RequestTrace:
    """One request as its client saw it. `completed`: exactly one end came, and it was no failure."""

    start_s: float
    pieces: list[Piece] = field(default_factory=list)
    end_s: float = math.nan
    completed: bool = False

    def of(self, output: str) -> list[Piece]:
        return [piece for piece in self.pieces if piece.output == output]


def trace_of(request: Mapping[str, Any]) -> RequestTrace:
    """A request of perf_analyzer's export (`timestamp`, `response_timestamps` in ns, `response_outputs`)."""
    start_s, pieces, ends, end_s = request["timestamp"] / 1e9, [], 0, math.nan
    for at_ns, outputs in zip(request["response_timestamps"], request["response_outputs"], strict=True):
        event = json.loads(outputs.get("event") or "{}")
        if event.get("type") == "end":
            ends, end_s = ends + (event["outcome"] == "completed"), at_ns / 1e9
        elif event.get("type") in ("text", "audio", "image"):
            pieces.append(Piece(at_ns / 1e9, event["type"], _audio_s(event, outputs)))
    return RequestTrace(start_s, pieces, end_s, ends == 1)


def _audio_s(event: Mapping[str, Any], outputs: Mapping[str, Any]) -> float:
    """Seconds of audio in a piece; what perf_analyzer shows as `audio` of other pieces is not theirs."""
    if event["type"] != "audio":
        return 0.0
    samples = outputs["audio"]
    return (len(samples) if isinstance(samples, list) else 1) / event["piece"]["sample_rate"]


def first_ms(one: RequestTrace, output: str) -> float | None:
    """From the request's start to its first piece of an output."""
    pieces = one.of(output)
    return 1e3 * (pieces[0].at_s - one.start_s) if pieces else None


def gaps_ms(pieces: Sequence[Piece]) -> list[float]:
    """Times between neighbours."""
    return [1e3 * (b.at_s - a.at_s) for a, b in itertools.pairwise(pieces)]


def audio_s(one: RequestTrace) -> float:
    """Seconds of audio."""
    return sum(piece.audio_s for piece in one.of("audio"))


def real_time_factor(one: RequestTrace) -> float | None:
    """Time until the last audio came, over the audio's length; below 1 is faster than it plays."""
    pieces, length_s = one.of("audio"), audio_s(one)
    return (pieces[-1].at_s - one.start_s) / length_s if length_s else None


def underruns_s(one: RequestTrace) -> list[float]:
    """Pauses of a player that starts at the first audio and plays each piece as soon as it can."""
    pauses: list[float] = []
    ready_s = math.inf  # when the player has played all it had
    for piece in one.of("audio"):
        if piece.at_s > ready_s:
            pauses.append(piece.at_s - ready_s)
        ready_s = piece.at_s + piece.audio_s if ready_s == math.inf else max(ready_s, piece.at_s) + piece.audio_s
    return pauses


def continuous(one: RequestTrace) -> bool:
    """True if a listener hears no pause."""
    return max(underruns_s(one), default=0.0) <= CONTINUOUS_S


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed (nearest rank); nan for none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True)
class Summary:
    """A load in numbers; nan where there was nothing to measure."""

    requests: int
    errors: int
    wall_s: float
    requests_per_s: float
    pieces_per_s: float
    first_text_p50_ms: float
    first_text_p99_ms: float
    first_audio_p50_ms: float
    first_audio_p99_ms: float
    gap_p99_ms: float
    rtf_p50: float
    underrun_max_ms: float
    continuity: float
    pieces: int


def summarize(traces: Sequence[RequestTrace]) -> Summary:
    """The table's numbers over all requests of one load, from the first start to the last end."""
    done = [one for one in traces if one.completed]
    sounding = [one for one in done if one.of("audio")]
    pieces = sum(len(one.pieces) for one in done)
    wall_s = max(one.end_s for one in done) - min(one.start_s for one in done) if done else math.nan
    text = [ms for one in done if (ms := first_ms(one, "text")) is not None]
    audio = [ms for one in done if (ms := first_ms(one, "audio")) is not None]
    gaps = [gap for one in done for output in ("text", "audio") for gap in gaps_ms(one.of(output))]
    return Summary(
        requests=len(traces),
        errors=len(traces) - len(done),
        wall_s=wall_s,
        requests_per_s=len(done) / wall_s,
        pieces_per_s=pieces / wall_s,
        first_text_p50_ms=percentile(text, 50),
        first_text_p99_ms=percentile(text, 99),
        first_audio_p50_ms=percentile(audio, 50),
        first_audio_p99_ms=percentile(audio, 99),
        gap_p99_ms=percentile(gaps, 99),
        rtf_p50=percentile([rtf for one in sounding if (rtf := real_time_factor(one)) is not None], 50),
        underrun_max_ms=1e3 * max((max(underruns_s(one), default=0.0) for one in sounding), default=math.nan),
        continuity=sum(map(continuous, sounding)) / len(sounding) if sounding else math.nan,
        pieces=pieces,
    )
