# SPDX-License-Identifier: Apache-2.0
"""What a Stop costs, counted in steps and turns: the same in every phase, and never more than the step under way."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kit.worker_harness import bench, chat
from triton_omni.backends.control import messages as msg
from triton_omni.backends.core.engine import EngineChunk, EngineOutput
from triton_omni.backends.core.outputs import TextPiece
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE

STEPS = 5


class Counting:
    """An engine that never ends by itself; counts each run's steps and calls `during` in the middle of one."""

    def __init__(self) -> None:
        self.runs = []
        self.steps = Counter()
        self.during = {}

    def open(self, run):
        self.runs.append(run)

    def feed(self, run, inputs, last):
        return True

    def stop(self, run):
        self.runs.remove(run)

    @property
    def has_work(self):
        return bool(self.runs)

    def step(self):
        events = []
        for run in list(self.runs):
            self.steps[run.id] += 1
            if self.steps[run.id] == STEPS and run.id in self.during:
                self.during[run.id]()
            events.append(EngineOutput(run, TextPiece("x")))
            events.append(EngineChunk(run))
        return events

    def close(self):
        self.runs.clear()


def test_a_stop_in_the_middle_of_a_step_lets_that_step_end_and_no_other_begin(tmp_path):
    engine = Counting()
    with bench(tmp_path, PIPELINE, "tokens", engine) as b:
        cut, goes_on = b.open(wanted=("text",)), b.open(wanted=("text",))
        engine.during[cut] = lambda: b.stop(cut)
        b.until(lambda: b.stub.of(msg.FinishedMessage))
        assert b.stub.of(msg.FinishedMessage)[0].reason == "stopped"
        b.turn(10)
        assert engine.steps[cut] == STEPS
        assert engine.steps[goes_on] > STEPS


PHASES = {
    "making tokens": ("tokens", chat(1_000), {}),
    "silent forever": ("tokens", chat(1_000, tokens={"hold_after": 0}), {}),
    "between two late tokens": ("tokens", chat(1_000, tokens={"delay_s": 3600.0}), {}),
    "waiting for the stage before": ("wave", chat(1_000), {"upstream": ("frames",)}),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_takes_one_turn_in_every_phase(tmp_path, phase):
    stage, request, more = PHASES[phase]
    engine = PIPELINE.stage(stage).engine(EngineContext("toy", stage, {}))
    with bench(tmp_path, PIPELINE, stage, engine) as b:
        run = b.open(request=request, wanted=("text",) if stage == "tokens" else ("audio",), **more)
        b.until(lambda: b.stub.of(msg.AcceptedMessage))
        b.turn(20)
        b.stop(run)
        b.turn(1)
        assert [end.reason for end in b.stub.of(msg.FinishedMessage)] == ["stopped"]
        assert not engine.has_work
