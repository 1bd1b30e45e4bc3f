# SPDX-License-Identifier: Apache-2.0
"""What a token costs, out of answers of two lengths."""

from __future__ import annotations

import pytest

from perf.token_path import LONG, SHORT, split, table


def test_the_cost_of_a_token_is_apart_from_that_of_a_request() -> None:
    token_us, request_ms = split(0.005 + SHORT * 20e-6, 0.005 + LONG * 20e-6)
    assert token_us == pytest.approx(20)
    assert request_ms == pytest.approx(5)


def test_the_dearest_process_comes_first_and_the_whole_last() -> None:
    turns = [{"proxy": (30.0 + k, 2.0), "worker": (90.0, 5.0), "wall": (50.0, 1.0)} for k in (0, 1, 2)]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(turns).splitlines()[2:]]
    assert rows == [["worker", "90", "5.0"], ["proxy", "31", "2.0"], ["all", "121", "7.0"], ["wall", "50", "1.0"]]
