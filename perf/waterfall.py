# SPDX-License-Identifier: Apache-2.0
"""Where the time goes between a client's socket and its first audio: the spans of a request in order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from tests.kit.otlp_collector import Span

PROXY = "POST /v1/chat/completions"
STEPS = (
    "the proxy has the head", "the orchestrator has the request", "admitted", "thinker accepted", "talker accepted",
    "code2wav accepted", "thinker: first token", "talker: first frame", "code2wav: first audio",
    "the orchestrator has the text", "the orchestrator has the audio", "the client has the text",
    "the client has the audio",
)  # fmt: skip
"""In the order in which they usually happen; rows are sorted by their median."""


def milestones(spans: Iterable[Span], pipeline: str, sent_s: float, text_s: float, audio_s: float) -> dict[str, float]:
    """Seconds from `sent_s` to each of STEPS, all on the wall clock of one host; steps without a span are left out."""
    found = {span.name: span for span in spans}
    at = {"the client has the text": text_s, "the client has the audio": audio_s}
    if PROXY in found:
        at["the proxy has the head"] = found[PROXY].start_s
    if pipeline in found:
        at["the orchestrator has the request"] = found[pipeline].start_s
        at |= {
            f"the orchestrator has the {k}": s
            for k in ("text", "audio")
            if (s := found[pipeline].event_s.get(f"first {k}"))
        }
    if "queue" in found:
        at["admitted"] = found["queue"].end_s
    firsts = {"thinker": "first token", "talker": "first frame", "code2wav": "first audio"}
    for stage, first in firsts.items():
        if (span := found.get(f"{pipeline}/{stage}")) is not None:
            at[f"{stage} accepted"] = span.start_s
            at |= {f"{stage}: {first}": s for s in [span.event_s.get("first output")] if s}
    return {step: at[step] - sent_s for step in STEPS if step in at}


def table(requests: Sequence[Mapping[str, float]]) -> str:
    """Medians over requests: when each step is reached, and its share of the time until the last one."""
    rows = {step: median(one[step] for one in requests if step in one) for step in STEPS if step in requests[0]}
    ordered = sorted(rows.items(), key=lambda row: row[1])
    lines = ["| step | reached after ms | since the step before ms | share |", "|---|---|---|---|"]
    before_s, whole_s = 0.0, ordered[-1][1]
    for step, at_s in ordered:
        took_s = at_s - before_s
        lines.append(f"| {step} | {1e3 * at_s:.1f} | {1e3 * took_s:.1f} | {took_s / whole_s:.0%} |")
        before_s = at_s
    return "\n".join(lines)
