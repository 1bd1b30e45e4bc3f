# SPDX-License-Identifier: Apache-2.0
"""What a second rank brings to the steps of one image with guidance: one process against two, a thread each.

    python -m perf.ranks                   the table, a few minutes of two cores
    python -m perf.ranks --only digits

A step here is both guidance branches of one image, guidance itself and the scheduler. `wall` is what a client waits;
it needs a core for each rank, which a shared machine does not always give. `CPU` is the CPU time of the busiest rank:
what a step would take if every rank had its core at once. The engines draw one image in turns, `--repeats` times;
each number is the median over all steps but the first of an image, when texts travel.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from perf.diffusion import STAGE, model_folders
from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.ids import new_run_id
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.diffusion.engine import DiffusionEngine

STEPS = 10
SIDES = {"digits": (64, 128, 256), "mid": (64, 256)}
CONFIGS: dict[str, dict[str, Any]] = {
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
    """Draw one image; what its steps cost."""
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
    while engine.has_work:
        engine.step()


def measure(folder: Path, sides: tuple[int, ...], configs: tuple[str, str], repeats: int) -> Iterator[str]:
    """Both configurations, alternating, as table rows. Only one engine with ranks fits into a process."""
    one, two = (
        DiffusionEngine(EngineContext("image", STAGE, {"model": str(folder), "max_batch_tokens": 1, **CONFIGS[config]}))
        for config in configs
    )
    with closing(one), closing(two):
        for side in sides:
            found = [[_median(steps_of(engine, side)) for engine in (one, two)] for _ in range(repeats + 1)]
            costs = [_median(each) for each in zip(*found[1:], strict=True)]
            for config, cost in zip(configs, costs, strict=True):
                yield (
                    f"{side} px | {config} | {cost.wall_s * 1e3:.1f} | {cost.wall_s / costs[0].wall_s:.2f} | "
                    f"{cost.busiest_s * 1e3:.1f} | {cost.busiest_s / costs[0].busiest_s:.2f} |"
                )


def _median(costs: Iterable[Cost]) -> Cost:
    return Cost(*map(statistics.median, zip(*costs, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print("| image | config | wall ms / step | vs one | CPU ms / step, busiest rank | vs one |")
    print("|---|---|---|---|---|---|")
    names = list(CONFIGS)
    models = {model for model in SIDES if args.only in model}
    with tempfile.TemporaryDirectory() as work:
        for model, folder in model_folders(Path(work), models).items():
            for pair in ((names[0], names[1]), (names[2], names[3])):
                for row in measure(folder, SIDES[model], pair, args.repeats) if model in models else ():
                    print(f"| {model} {row}", flush=True)


if __name__ == "__main__":
    main()
