# SPDX-License-Identifier: Apache-2.0
"""Measures over requests whose times are known."""

from __future__ import annotations

import json
import math

import pytest

from perf import measures
from perf.measures import Piece, RequestTrace


def talk(*pieces: tuple[float, float]) -> RequestTrace:
    """A request started at 10 s with audio pieces (seconds after the start, seconds of audio)."""
    return RequestTrace(10.0, [Piece(10.0 + at, "audio", length) for at, length in pieces], 10.0 + pieces[-1][0], True)


def exported(*responses: tuple[int, dict, object]) -> dict:
    """A request as perf_analyzer writes it, started at 1 s; responses are (ms after start, event, audio)."""
    return {
        "timestamp": 10**9,
        "response_timestamps": [10**9 + ms * 10**6 for ms, _, _ in responses],
        "response_outputs": [{"event": json.dumps(event), "audio": audio} for _, event, audio in responses],
    }


TEXT = {"type": "text", "output": "text"}
AUDIO = {"type": "audio", "output": "audio", "piece": {"sample_rate": 1000}}
END = {"type": "end", "outcome": "completed"}


def test_a_request_is_read_from_the_export():
    one = measures.trace_of(exported((5, TEXT, 7.5), (20, AUDIO, [0.0] * 50), (30, AUDIO, 0.25), (31, END, -1.0)))
    assert [(p.output, p.audio_s) for p in one.pieces] == [("text", 0.0), ("audio", 0.05), ("audio", 0.001)]
    assert measures.first_ms(one, "text") == pytest.approx(5)
    assert measures.first_ms(one, "audio") == pytest.approx(20)
    assert measures.first_ms(one, "image") is None
    assert one.completed and one.end_s == pytest.approx(1.031)


@pytest.mark.parametrize("last", [{"type": "end", "outcome": "cancelled"}, TEXT, {}])
def test_a_request_without_a_completed_end_is_an_error(last):
    one = measures.trace_of(exported((5, TEXT, 0.0), (6, last, 0.0)))
    assert not one.completed
    assert measures.summarize([one]).errors == 1


def test_two_ends_are_an_error():
    assert not measures.trace_of(exported((5, END, 0.0), (6, END, 0.0))).completed


def test_audio_that_comes_in_time_has_no_pause():
    one = talk((1.0, 0.5), (1.2, 0.5), (1.9, 0.5))
    assert measures.underruns_s(one) == []
    assert measures.continuous(one)
    assert measures.real_time_factor(one) == pytest.approx(1.9 / 1.5)


def test_the_player_waits_for_late_audio_and_goes_on_from_there():
    one = talk((1.0, 0.5), (1.75, 0.5), (2.3, 0.5))  # trace_of until 1.5, then until 2.25
    assert measures.underruns_s(one) == pytest.approx([0.25, 0.05])
    assert not measures.continuous(one)


def test_a_pause_of_a_tenth_of_a_second_is_not_counted():
    assert measures.continuous(talk((0.0, 0.5), (0.59, 0.5)))


def test_percentiles_are_values_that_occurred():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [measures.percentile(values, p) for p in (1, 25, 50, 51, 99, 100)] == [1.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    assert math.isnan(measures.percentile([], 50))


def test_a_load_is_summed_up_from_first_start_to_last_end():
    early, late = talk((1.0, 1.0), (1.5, 1.0)), talk((2.0, 1.0), (4.0, 1.0))
    found = measures.summarize([early, late, RequestTrace(10.0)])
    assert (found.requests, found.errors, found.pieces) == (3, 1, 4)
    assert found.wall_s == pytest.approx(4.0)
    assert found.requests_per_s == pytest.approx(0.5)
    assert found.pieces_per_s == pytest.approx(1.0)
    assert found.first_audio_p50_ms == pytest.approx(1000)
    assert found.first_audio_p99_ms == pytest.approx(2000)
    assert found.underrun_max_ms == pytest.approx(1000)
    assert found.continuity == 0.5
    assert math.isnan(found.first_text_p50_ms)


def test_a_load_without_an_answer_has_no_numbers():
    found = measures.summarize([RequestTrace(1.0)])
    assert (found.errors, found.pieces) == (1, 0)
    assert math.isnan(found.wall_s) and math.isnan(found.continuity)
