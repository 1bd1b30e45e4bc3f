# SPDX-License-Identifier: Apache-2.0
"""Comparisons of perf.bench: ratios, spreads, order of turns, the report, and guards that turn red."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import bench
from perf.measures import Piece, RequestTrace
from perf.paired import Better, Comparison, Report, alternate, compare


def comparison(ours: list[float], theirs: list[float], better: Better = "higher") -> Comparison:
    return Comparison("speech", "4 streams", "requests/s", "1/s", better, "server", ours, "one process", theirs)


def test_ratios_are_of_the_same_turn() -> None:
    found = comparison([2.0, 4.0, 9.0], [1.0, 4.0, 3.0])
    assert found.ratios == [2.0, 1.0, 3.0]
    assert found.ratio == 2.0
    assert found.spread == pytest.approx((2.5 - 1.5) / 2.0)  # quartiles 1.5 and 2.5


@pytest.mark.parametrize(
    ("ours", "better", "lost"),
    [
        ([0.9, 0.9, 0.9], "higher", True),
        ([0.99, 0.99, 0.99], "higher", False),
        ([1.1, 1.1, 1.1], "lower", True),
        ([1.1, 1.1, 1.1], "higher", False),
        ([0.5, 0.95, 1.4], "higher", False),  # inside the spread
    ],
)
def test_a_loss_is_more_than_the_spread(ours: list[float], better: Better, lost: bool) -> None:
    assert comparison(ours, [1.0, 1.0, 1.0], better).is_lost is lost


def test_subjects_take_turns_in_both_orders() -> None:
    order: list[str] = []

    def subject(name: str) -> dict[str, float]:
        order.append(name)
        return {"n": len(order)}

    found = alternate({"a": lambda: subject("a"), "b": lambda: subject("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [values["n"] for values in found["b"]] == [2, 3, 6]


def test_only_quantities_that_both_have_are_compared() -> None:
    found = {"a": [{"x": 1.0, "y": 2.0}], "b": [{"x": 2.0}]}
    assert [c.quantity for c in compare(found, "a", "b", "s", "1", {"x": ("", "lower"), "y": ("", "lower")})] == ["x"]


def test_the_report_is_written_whole(tmp_path: Path) -> None:
    report = Report({"CPU": "one"}, [comparison([0.5, 0.5], [1.0, 1.0])], [("toy", "proxy", "2 loops")])
    made = report.write(tmp_path)
    [row] = json.loads((tmp_path / "bench.json").read_text())["comparisons"]
    assert (row["ratio"], row["lost"], row["ours"]) == (0.5, True, [0.5, 0.5])
    text = (tmp_path / "bench.md").read_text()
    assert "| 4 streams | requests/s, 1/s | server | 0.5 | one process | 1 | 0.50 | 0% | 2 |" in text
    assert "* speech, 4 streams: requests/s of server 0.50× that of one process" in text
    assert "* proxy: 2 loops" in text
    assert all(path.stat().st_size for path in made)


def smoke_report(**changed: float) -> Report:
    """What --smoke measures, all well inside the bounds unless changed."""
    values = {"proxy": 1.0, "server": 1.0, "first": 1.0, "loops": 1.0} | changed
    pairs = [
        ("proxy", "server", "requests/s", values["proxy"]),
        ("server", "one process", "requests/s", values["server"]),
        ("proxy", "one process", "first audio", values["first"]),
    ]
    comparisons = [Comparison("chat", "4", q, "", "higher", s, [v], o, [1.0]) for s, o, q, v in pairs]
    facts = [("toy, CPU", role, f"{values['loops']:.3f} loops, 1 us") for role in bench.LOOP_BOUNDS]
    return Report({}, comparisons, facts)


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({}, 0),
        ({"proxy": 0.89}, 1),
        ({"server": 0.84}, 1),
        ({"first": 1.31}, 1),
        ({"loops": 10.0}, len(bench.LOOP_BOUNDS)),
    ],
)
def test_guards_turn_red(changed: dict[str, float], broken: int) -> None:
    assert sum(not guard.holds for guard in bench.guards(smoke_report(**changed))) == broken


def test_a_load_with_a_failed_request_is_no_measurement() -> None:
    good = RequestTrace(0.0, [Piece(0.1, "text")], 0.2, True)
    with pytest.raises(RuntimeError, match="1 of 2 requests failed"):
        bench.speech_values([good, RequestTrace(0.0, [], 0.2, False)])
