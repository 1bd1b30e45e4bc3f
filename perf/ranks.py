# SPDX-License-Identifier: Apache-2.0
"""What a second rank brings to the steps of one picture with guidance: one process against two, a thread each.

    python -m perf.ranks                   the table, a few minutes of two cores
    python -m perf.ranks --only "mid 256"

A step here is both guidance branches of one picture, guidance itself and the scheduler. `wall` is what a client waits;
it needs a core for each rank, which a shared machine does not always give. `CPU` is the CPU time of the busiest rank:
what a step would take if every rank had its core at once. The engines draw one picture in turns, `--repeats` times;
each number is the median over all steps but the first of a picture, when texts travel.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from backends.core.engine import Run
from backends.core.generate import GenerateRequest
from backends.core.ids import new_run_id
from backends.core.pipeline import EngineContext
from backends.diffusion.engine import DiffusionEngine
from perf.diffusion import STAGE, model_folders

STEPS = 10
CELLS = (("digits", 64), ("digits", 128), ("digits", 256), ("mid", 64), ("mid", 256))
MANNERS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "cfg: 2": {"parallel": {"cfg": 2}},
    "one rank, seq": {"batching": "seq"},
    "context: 2": {"batching": "seq", "parallel": {"context": 2}},
}


class Cost(NamedTuple):
    """Seconds of one step."""

    wall_s: float
    busiest_s: float


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux's clock of another process: clock_getcpuclockid(3)


def steps_of(engine: DiffusionEngine, side: int) -> Iterator[Cost]:
    """Draw one picture; what its steps cost."""
    options = {"width": side, "height": side, "steps": STEPS, "seed": 1, "true_cfg_scale": 2.5, "negative_prompt": " "}
    request = GenerateRequest(operation="image", input="a red 7 on a yellow background", stages={STAGE: options})
    run = Run(new_run_id(), "perf", request)
    engine.open(run)
    ranks = engine.model.ranks
    pids = [os.getpid(), *([] if ranks is None else ranks.pids)]
    while run.state.steps_left:
        began, before = run.state.step, [cpu_s(pid) for pid in pids]
        started = time.perf_counter()
        engine.step()
        cost = Cost(time.perf_counter() - started, max(cpu_s(p) - b for p, b in zip(pids, before, strict=True)))
        if 0 < began < run.state.step:
            yield cost
    while engine.busy:
        engine.step()


def measure(folder: Path, side: int, manners: tuple[str, str], repeats: int) -> dict[str, Cost]:
    """Both manners in turns; only one engine with ranks fits into a process."""
    engines = {
        manner: DiffusionEngine(
            EngineContext("image", STAGE, {"model": str(folder), "max_batch_tokens": 1, **MANNERS[manner]})
        )
        for manner in manners
    }
    costs: dict[str, list[Cost]] = {manner: [] for manner in manners}
    with closing(engines[manners[0]]), closing(engines[manners[1]]):
        for _ in range(repeats + 1):
            for manner, engine in engines.items():
                costs[manner].append(Cost(*map(statistics.median, zip(*steps_of(engine, side), strict=True))))
    return {m: Cost(*map(statistics.median, zip(*found[1:], strict=True))) for m, found in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models and sizes whose name contains this")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print("| picture | manner | wall ms / step | vs one | CPU ms / step, busiest rank | vs one |")
    print("|---|---|---|---|---|---|")
    names = list(MANNERS)
    cells = [(model, side) for model, side in CELLS if args.only in f"{model} {side} px"]
    with tempfile.TemporaryDirectory() as work:
        folders = model_folders(Path(work), {model for model, _ in cells})
        for model, side in cells:
            for pair in ((names[0], names[1]), (names[2], names[3])):
                found = measure(folders[model], side, pair, args.repeats)
                one = found[pair[0]]
                for manner, cost in found.items():
                    print(
                        f"| {model} {side} px | {manner} | {cost.wall_s * 1e3:.1f} | {cost.wall_s / one.wall_s:.2f} | "
                        f"{cost.busiest_s * 1e3:.1f} | {cost.busiest_s / one.busiest_s:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
