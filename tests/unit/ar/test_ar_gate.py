# SPDX-License-Identifier: Apache-2.0
"""The two halves of runs whose rows arrive: the worker's gate, and a store of rows in two ranks that read its notes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the engine environment (make setup)")

from triton_omni.backends.ar.gate import RowGate  # noqa: E402
from triton_omni.backends.ar.hooks import Span  # noqa: E402
from triton_omni.backends.ar.rows import BeginRows, EndRows, RowStore  # noqa: E402

KEY = "run"
NO_IDS: Any = ["no id"]
LIMIT_S = 120
RANKS = """
import multiprocessing, threading
from types import SimpleNamespace
import torch
from triton_omni.backends.ar.ranks import die_on_error, die_with_worker, watch_ranks
from triton_omni.backends.ar.rows import BeginRows, RowStore

class Network:
    pad_text = 0

    def __init__(self, number):
        self.number = number

    def text_rows(self, ids):
        return torch.tensor(ids, dtype=torch.float32)[:, None]

    def prompt_rows(self, ids):
        rows = self.text_rows(ids)
        if len(ids) > 1 and self.number == 1:
            raise torch.OutOfMemoryError("no room for rows")
        return rows

def rank(number):
    die_with_worker()
    store = RowStore(Network(number))
    with die_on_error(number):
        store.apply([BeginRows("bad", ["no id"]), BeginRows("large", [5, 6])])
        assert list(store.runs) == ["large"]
    threading.Event().wait()  # as one that waits in a collective call

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = [SimpleNamespace(proc=context.Process(target=rank, args=(number,), daemon=True)) for number in range(2)]
    for each in ranks:
        each.proc.start()
    watch_ranks(SimpleNamespace(workers=ranks, is_failed=False))
    threading.Event().wait()
"""


class Network:
    """A `Network` of ar/rows.py whose rows are their own ids; a frame is its token and, drawn or not, a second code."""

    pad_text = 1000

    def prompt_rows(self, prompt):
        return self.text_rows(prompt)

    def text_rows(self, token_ids):
        return torch.tensor(token_ids, dtype=torch.float32)[:, None].expand(-1, 2).clone()

    def predict(self, hidden, tokens, draws):
        drawn = torch.where(draws.greedy, 7, (draws.seeds * 31 + draws.frames) % 100)
        frames = torch.stack([tokens, drawn], 1)
        return frames, frames.sum(1)[:, None].expand(-1, 2) / 1e6


def hand_over(rank, gate):
    gate.on_step_result(rank.step_result())


def step(gate, ranks, position, token):
    """One run's step at `position`, as vLLM makes it: every rank gets the same events and fills the same row."""
    assert gate.ready(KEY, position)
    events = pickle.dumps(gate.control_events())
    filled = []
    for rank in ranks:
        rank.apply(pickle.loads(events))
        rows = torch.zeros(1, 2)
        rank.fill([Span(KEY, position, 0, 1)], rows)
        rank.on_sampled([KEY], rows, [token])
        filled.append(rows[0, 0].item())
    made = [rank.step_result() for rank in ranks]
    assert all((m.keys, m.frames.tolist()) == (made[0].keys, made[0].frames.tolist()) for m in made)
    gate.on_step_result(pickle.loads(pickle.dumps(made[0])))
    assert filled[1:] == filled[:-1]
    return filled[0]


@pytest.mark.parametrize("seed", [None, 3])
def test_rows_are_made_of_the_frame_before_and_the_words_as_they_come(seed):
    gate, ranks = RowGate(), [RowStore(Network()), RowStore(Network())]
    run = gate.begin(BeginRows(KEY, [5], seed=seed), 1)
    assert step(gate, ranks, 0, 40) == 5
    assert not run.can_step, "its next word is missing"
    gate.push_tokens(KEY, [6, 8], last=False)
    assert [int(step(gate, ranks, 1, 41)), int(step(gate, ranks, 2, 42))] == [6, 8]
    assert not run.can_step
    gate.push_tokens(KEY, [], last=True)
    assert int(step(gate, ranks, 3, 43)) == Network.pad_text
    assert [frame[0] for frame in run.frames] == [40, 41, 42, 43]
    assert run.steps == 4
    run.paused = True
    assert not run.can_step


def test_a_preempted_run_finds_the_same_rows():
    gate, rank = RowGate(), RowStore(Network())
    gate.begin(BeginRows(KEY, [5, 6]), 2)
    gate.push_tokens(KEY, [7, 8], last=True)
    rank.apply(gate.control_events())
    for token in (40, 41):
        rank.on_sampled([KEY], torch.zeros(1, 2), [token])
    again = torch.zeros(4, 2)
    rank.fill([Span(KEY, 0, 0, 4)], again)
    assert again[:, 0].tolist() == pytest.approx([5, 6, 7 + 47e-6, 8 + 48e-6])


def test_a_run_that_ends_before_a_step_costs_the_ranks_nothing():
    gate, rank = RowGate(), RowStore(Network())
    gate.begin(BeginRows(KEY, [5]), 1)
    gate.push_tokens(KEY, [6], last=False)
    gate.begin(BeginRows("other", [5]), 1)
    gate.end(KEY)
    events = gate.control_events()
    assert [type(event) for event in events] == [BeginRows, EndRows]
    rank.apply(events)
    assert list(rank.runs) == ["other"] and list(gate.runs) == ["other"]
    assert gate.control_events() == []


def test_a_note_that_cannot_be_followed_breaks_its_run_alone():
    gate, rank = RowGate(), RowStore(Network())
    runs = [gate.begin(BeginRows(key, prompt), 1) for key, prompt in (("good", [5]), ("bad", ["no id"]), ("late", [5]))]
    gate.push_tokens("late", NO_IDS, last=False)
    rank.apply(gate.control_events())
    rows = torch.ones(3, 2)
    rank.fill([Span("good", 0, 0, 1), Span("bad", 0, 1, 1), Span("late", 0, 2, 1)], rows)
    assert rows[:, 0].tolist() == [5, 0, 0]
    rank.on_sampled(["bad", "good", "late"], torch.zeros(3, 2), [40, 41, 42])
    hand_over(rank, gate)
    assert [run.steps for run in runs] == [1, 0, 0] and runs[0].frames[0][0] == 41
    assert [bool(run.failure) for run in runs] == [False, True, True]
    gate.end("bad")
    rank.apply(gate.control_events())
    assert set(rank.runs) == {"good", "late"}


def test_numbers_without_bounds_break_their_run_alone():
    gate, rank = RowGate(), RowStore(Network())
    good, bad = (gate.begin(BeginRows(key, [5], seed=3), 1) for key in ("good", "bad"))
    rank.apply(gate.control_events())
    hidden = torch.zeros(2, 2)
    hidden[1, 0] = torch.inf
    rank.on_sampled(["good", "bad"], hidden, [40, 41])
    hand_over(rank, gate)
    assert (good.steps, bad.steps) == (1, 0) and bad.failure and not good.failure
    rank.on_sampled(["bad"], torch.zeros(1, 2), [42])
    hand_over(rank, gate)
    assert bad.steps == 0, "a broken run stays broken"


def test_a_want_of_memory_breaks_its_run_alone_where_there_is_one_rank():
    class Short(Network):
        def prompt_rows(self, prompt):
            raise torch.OutOfMemoryError("no room for rows")

    gate, rank = RowGate(), RowStore(Short())
    run = gate.begin(BeginRows(KEY, [5]), 1)
    rank.apply(gate.control_events())
    rank.on_sampled([KEY], torch.zeros(1, 2), [40])
    hand_over(rank, gate)
    assert run.failure == "OutOfMemoryError: no room for rows"


@pytest.mark.timeout(180)
def test_a_want_of_memory_in_one_of_two_ranks_ends_the_worker(tmp_path):
    """The other would wait for it in a collective call; what is wrong with a note is wrong in both, and they go on."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert "rank 1 cannot take part in a step any more" in done.stderr and "no room for rows" in done.stderr
    assert "rank 1 of 2 died" in done.stderr
    assert "rank 0 cannot" not in done.stderr
