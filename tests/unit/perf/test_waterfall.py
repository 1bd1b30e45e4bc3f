# SPDX-License-Identifier: Apache-2.0
"""The waterfall of a request's spans."""

from __future__ import annotations

from perf.waterfall import milestones, table
from tests.kit.otlp_collector import Span


def span(name: str, start_s: float, end_s: float, **events: float) -> Span:
    named = {name.replace("_", " "): at for name, at in events.items()}
    return Span(name, "s", "t", "i", "p", start_s, end_s, False, "", {}, list(named), named)


def test_steps_count_from_the_clients_request() -> None:
    spans = [
        span("POST /v1/chat/completions", 100.001, 101.0),
        span("qwen3_omni", 100.005, 101.0, first_text=100.040, first_audio=100.090),
        span("queue", 100.005, 100.006),
        span("qwen3_omni/thinker", 100.010, 101.0, first_output=100.035),
        span("qwen3_omni/code2wav", 100.014, 101.0, first_output=100.085),
    ]
    steps = milestones(spans, "qwen3_omni", 100.0, 100.045, 100.1)
    assert {step: round(1e3 * at_s) for step, at_s in steps.items()} == {
        "the proxy has the head": 1, "the orchestrator has the request": 5, "admitted": 6, "thinker accepted": 10,
        "code2wav accepted": 14, "thinker: first token": 35, "code2wav: first audio": 85,
        "the orchestrator has the text": 40, "the orchestrator has the audio": 90, "the client has the text": 45,
        "the client has the audio": 100,
    }  # fmt: skip


def test_rows_are_in_order_of_time_and_their_shares_make_the_whole() -> None:
    made = table([{"admitted": 0.01, "thinker accepted": 0.04}, {"admitted": 0.03, "thinker accepted": 0.06}])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made.splitlines()[2:]]
    assert rows == [["admitted", "20.0", "20.0", "40%"], ["thinker accepted", "50.0", "30.0", "60%"]]
