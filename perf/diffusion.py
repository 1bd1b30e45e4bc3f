# SPDX-License-Identifier: Apache-2.0
"""Does batching pay? The diffusion engine under bursts and Poisson arrivals, with and without it.

    python -m perf.diffusion                     the table, about 15 CPU minutes
    python -m perf.diffusion --only "digits 64"  the workloads whose name contains this

The clock is the CPU time of this process (one thread), so other work on a shared machine does not count; while the
engine has nothing to do, the clock jumps to the next arrival. `off` draws one request after the other; `packed` uses
the token budget that the engine measures when it loads; `no cap` packs whatever is there, and shows why there is a
budget; `stock` is what diffusers' pipeline does, one after the other, branch by branch. Loads are multiples of what
`off` can serve, and the "vs off" columns compare with it in the same load. Every cell is the median of `--repeats`
lives by mean latency. On a shared machine single lives of the very same policy differ by a tenth, sometimes more.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.core.engine import Failed, Finished, Run
from backends.core.generate import GenerateRequest
from backends.core.ids import new_run_id
from backends.core.pipeline import EngineContext
from backends.diffusion.engine import DiffusionEngine
from backends.pipelines.image.build_small import Sizes, make_pipeline
from backends.pipelines.image.digits_data import evaluation_set

STAGE = "denoiser"
NO_CAP = 1 << 30
PACKAGE = Path(__file__).parents[1] / "backends" / "pipelines" / "image"
POLICIES: dict[str, dict[str, Any]] = {
    "off": {"batching": "packed", "max_batch_tokens": 1},
    "packed": {"batching": "packed", "max_batch_tokens": 0},
    "no cap": {"batching": "packed", "max_batch_tokens": NO_CAP},
    "stock": {"batching": "seq", "max_batch_tokens": 1},
}
MID = Sizes(
    layers=8, heads=8, head_dim=64, rope_axes=(16, 24, 24), latent_channels=16, vae_base=16, text_dim=256, text_layers=4
)
"""A random model of 78 M parameters that keeps one core busy with a single small picture."""


@dataclass(frozen=True)
class Workload:
    """What clients ask for. Each field but the first three is a choice made per request."""

    name: str
    model: str
    requests: int
    sides: tuple[int, ...]
    steps: tuple[int, ...]
    scales: tuple[float, ...]
    loads: tuple[float, ...] = (0.0, 0.5, 0.9, 1.5)

    def asked(self) -> Iterator[GenerateRequest]:
        """The same requests every time."""
        rng = random.Random(1)
        for number, (prompt, _) in enumerate(evaluation_set(self.requests)):
            options = {
                "width": rng.choice(self.sides), "height": rng.choice(self.sides), "steps": rng.choice(self.steps),
                "true_cfg_scale": rng.choice(self.scales), "negative_prompt": " ", "seed": number,
            }  # fmt: skip
            yield GenerateRequest(operation="image", input=prompt, stages={STAGE: options})


WORKLOADS = (
    Workload("digits 64 px", "digits", 32, (64,), (12,), (2.5,)),
    Workload("digits mixed", "digits", 32, (64, 96, 128), (8, 12, 20), (1.0, 2.5, 4.0)),
    Workload("digits 256 px", "digits", 12, (256,), (8,), (2.5,), (0.0, 0.9, 1.5)),
    Workload("mid 64 px", "mid", 12, (64,), (6, 8), (1.0, 2.5), (0.0, 0.9)),
    Workload("mid 256 px", "mid", 6, (256,), (5, 6), (1.0,), (0.0, 0.9)),
)


class Clock:
    """CPU seconds of this process, plus the idle time that was skipped."""

    def __init__(self) -> None:
        self._start = time.process_time()

    def now(self) -> float:
        return time.process_time() - self._start

    def skip_to(self, moment: float) -> None:
        self._start -= max(0.0, moment - self.now())


@dataclass(frozen=True)
class Result:
    """One cell of the table."""

    total_s: float
    latencies_s: list[float]
    forwards: int
    steps: int

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.latencies_s)

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.total_s


def drive(engine: DiffusionEngine, workload: Workload, gap_s: float) -> Result:
    """Open the requests as they arrive, step until all are done."""
    rng = random.Random(2)
    arrivals: list[tuple[float, GenerateRequest]] = []
    moment = 0.0
    for request in workload.asked():
        arrivals.append((moment, request))
        moment += rng.expovariate(1 / gap_s) if gap_s else 0.0
    clock, forwards = Clock(), engine.forwards
    came: dict[bytes, float] = {}
    latencies: list[float] = []
    while arrivals or engine.busy:
        while arrivals and arrivals[0][0] <= clock.now():
            at, request = arrivals.pop(0)
            run = Run(new_run_id(), "perf", request)
            came[run.id] = at
            engine.open(run)
        if not engine.busy:
            clock.skip_to(arrivals[0][0])
            continue
        for event in engine.step():
            assert not isinstance(event, Failed), event.error.message
            if isinstance(event, Finished):
                latencies.append(clock.now() - came[event.run.id])
    steps = sum(int(r.stages[STAGE]["steps"]) for r in workload.asked())
    return Result(clock.now(), latencies, engine.forwards - forwards, steps)


def model_folders(work: Path, needed: set[str]) -> dict[str, Path]:
    """The shipped model, and a larger random one made here."""
    found = {"digits": PACKAGE / "digits"}
    if "mid" in needed:
        found["mid"] = work / "mid"
        make_pipeline(MID).save_pretrained(found["mid"])
    return found


def measure(workload: Workload, folder: Path, repeats: int) -> Iterator[str]:
    """The rows of one workload."""
    engines: dict[str, DiffusionEngine] = {}
    for policy, options in POLICIES.items():
        context = EngineContext("image", STAGE, {"model": str(folder), **options})
        engines[policy] = DiffusionEngine(context)
    warm = Workload("", "", 1, workload.sides[:1], (2,), (2.5,))
    for engine in engines.values():
        drive(engine, warm, 0.0)
    service_s = 0.0
    for load in workload.loads:
        base: Result | None = None
        for policy, engine in engines.items():
            lives = [drive(engine, workload, service_s / load if load else 0.0) for _ in range(repeats)]
            result = sorted(lives, key=lambda life: life.mean_s)[repeats // 2]
            if base is None:
                base = result
                service_s = service_s or result.total_s / workload.requests
            budget = "" if engine.budget in (1, NO_CAP) else f" ({engine.budget} tokens)"
            p95_ms = sorted(result.latencies_s)[int(0.95 * (len(result.latencies_s) - 1))] * 1e3
            yield (
                f"| {workload.name} | {f'{load} x' if load else 'burst'} | {policy}{budget} | {result.per_s:.2f} "
                f"| {result.per_s / base.per_s:.2f} | {result.mean_s * 1e3:.0f} | {result.mean_s / base.mean_s:.2f} "
                f"| {p95_ms:.0f} | {result.steps / result.forwards:.1f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    chosen = [w for w in WORKLOADS if args.only in w.name]
    print("| workload | load | batching | pictures / CPU-s | vs off | mean ms | vs off | p95 ms | requests / step |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work:
        folders = model_folders(Path(work), {w.model for w in chosen})
        for workload in chosen:
            for row in measure(workload, folders[workload.model], args.repeats):
                print(row, flush=True)


if __name__ == "__main__":
    main()
