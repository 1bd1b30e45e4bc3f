# SPDX-License-Identifier: Apache-2.0
"""Does batching pay? The diffusion engine under bursts and Poisson arrivals, with and without it.

    python -m perf.diffusion                     the table, about an hour of one core
    python -m perf.diffusion --only "digits 64"  the workloads whose name contains this

`off` runs one request after the other; `packed` batches where the step cost that the engine measures at load says
that it pays; `no rule` batches everything, and shows why there is a rule; `stock` is diffusers' arithmetic, one
request after the other, branch by branch (in bursts only). Loads are multiples of the capacity of `off`, and the "vs
off" columns compare with it.

The clock is the CPU time of this process (one thread), so other load on a shared machine does not count, except that
it changes the speed of a CPU second from one minute to the next. So all policies of a cell run at the same time: each
has a clock of its own steps, and the one that is behind takes the next steps. While an engine has no work its clock
jumps to the next arrival. `off again` is the same policy as `off`: their difference is the error of the measurement.
Every cell is the median of `--repeats` repetitions with different arrivals.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_omni.backends.core.engine import EngineFailed, EngineFinished, Run
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.ids import new_run_id
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.diffusion.engine import DiffusionEngine
from triton_omni.backends.tools.digits.data import evaluation_set
from triton_omni.backends.tools.digits.small_model import Sizes, make_pipeline

STAGE = "denoiser"
TURN_S = (
    0.05  # CPU time before another policy has its turn; shorter, and they evict one another's weights from the cache
)
PACKAGE = Path(__file__).parents[1] / "backends" / "pipelines" / "image"
POLICIES: dict[str, dict[str, Any]] = {
    "off": {"max_batch_tokens": 1},
    "off again": {"max_batch_tokens": 1},
    "packed": {},
    "no rule": {"step_overhead_tokens": 1 << 30},
    "stock": {"batching": "seq", "max_batch_tokens": 1},
}
MID = Sizes(
    layers=8, heads=8, head_dim=64, rope_axes=(16, 24, 24), latent_channels=16, vae_base=16, text_dim=256, text_layers=4
)
"""A random model of 78 M parameters that keeps one core busy with a single small image."""


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


@dataclass(frozen=True)
class Result:
    """What one policy made of one stream of requests."""

    total_s: float
    latencies_s: list[float]
    steps_per_forward: float

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.latencies_s)

    @property
    def p95_s(self) -> float:
        return sorted(self.latencies_s)[int(0.95 * (len(self.latencies_s) - 1))]

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.total_s


class PolicyRun:
    """One engine that serves one stream of requests on its own clock."""

    def __init__(self, engine: DiffusionEngine, workload: Workload, gap_s: float, seed: int) -> None:
        rng = random.Random(seed)
        self._engine, self._forwards = engine, engine.forwards
        self._arrivals: deque[tuple[float, GenerateRequest]] = deque()
        self._arrived_s: dict[bytes, float] = {}
        self._latencies: list[float] = []
        self._steps = 0
        self.now_s = moment = 0.0
        for request in workload.asked():
            self._arrivals.append((moment, request))
            self._steps += int(request.stages[STAGE]["steps"])
            moment += rng.expovariate(1 / gap_s) if gap_s else 0.0

    @property
    def is_over(self) -> bool:
        return not self._arrivals and not self._engine.has_work

    def turn(self) -> None:
        """Some steps, or a jump to the next arrival."""
        end_s = self.now_s + TURN_S
        while self.now_s < end_s and not self.is_over:
            started = time.process_time()
            while self._arrivals and self._arrivals[0][0] <= self.now_s:
                at, request = self._arrivals.popleft()
                run = Run(new_run_id(), "perf", request)
                self._arrived_s[run.id] = at
                self._engine.open(run)
            if not self._engine.has_work:
                self.now_s = self._arrivals[0][0]
                continue
            events = self._engine.step()
            self.now_s += time.process_time() - started
            for event in events:
                assert not isinstance(event, EngineFailed), event.error.message
                if isinstance(event, EngineFinished):
                    self._latencies.append(self.now_s - self._arrived_s[event.run.id])

    def result(self) -> Result:
        return Result(self.now_s, self._latencies, self._steps / (self._engine.forwards - self._forwards))


def run_policies(engines: dict[str, DiffusionEngine], workload: Workload, gap_s: float, seed: int) -> dict[str, Result]:
    """Every engine serves the same stream; the one that is behind takes the next turn."""
    runs = {policy: PolicyRun(engine, workload, gap_s, seed) for policy, engine in engines.items()}
    while unfinished := [run for run in runs.values() if not run.is_over]:
        min(unfinished, key=lambda run: run.now_s).turn()
    return {policy: run.result() for policy, run in runs.items()}


def model_folders(work: Path, needed: set[str]) -> dict[str, Path]:
    """The shipped model, and a larger random one made here."""
    found = {"digits": PACKAGE / "digits"}
    if "mid" in needed:
        found["mid"] = work / "mid"
        make_pipeline(MID).save_pretrained(found["mid"])
    return found


def measure(workload: Workload, folder: Path, repeats: int) -> Iterator[str]:
    """The rows of one workload."""
    engines = {
        policy: DiffusionEngine(EngineContext("image", STAGE, {"model": str(folder), **options}))
        for policy, options in POLICIES.items()
    }
    print(f"{workload.name}: step cost {engines['packed'].step_cost}", file=sys.stderr, flush=True)
    run_policies(engines, Workload("", "", 1, workload.sides[:1], (2,), (2.5,)), 0.0, 0)
    service_s = 0.0
    for load in workload.loads:
        if load:
            engines.pop("stock", None)
        found = [run_policies(engines, workload, service_s / load if load else 0.0, seed) for seed in range(repeats)]
        if not service_s:
            service_s = statistics.median(1 / one["off"].per_s for one in found)
        for policy in engines:
            yield f"| {workload.name} | {f'{load} x' if load else 'burst'} | {policy} | {_cells(found, policy)} |"


def _cells(found: list[dict[str, Result]], policy: str) -> str:
    """Medians over the repeats, of the numbers and of what they are to `off` in the same repeat."""
    mine, off = [one[policy] for one in found], [one["off"] for one in found]
    pairs = list(zip(mine, off, strict=True))
    return " | ".join(
        (
            f"{statistics.median(m.per_s for m in mine):.2f}",
            f"{statistics.median(m.per_s / o.per_s for m, o in pairs):.2f}",
            f"{statistics.median(m.mean_s for m in mine) * 1e3:.0f}",
            f"{statistics.median(m.mean_s / o.mean_s for m, o in pairs):.2f}",
            f"{statistics.median(m.p95_s for m in mine) * 1e3:.0f}",
            f"{statistics.median(m.steps_per_forward for m in mine):.1f}",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    chosen = [w for w in WORKLOADS if args.only in w.name]
    print("| workload | load | batching | images / CPU-s | vs off | mean ms | vs off | p95 ms | requests / step |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work:
        folders = model_folders(Path(work), {w.model for w in chosen})
        for workload in chosen:
            for row in measure(workload, folders[workload.model], args.repeats):
                print(row, flush=True)


if __name__ == "__main__":
    main()
