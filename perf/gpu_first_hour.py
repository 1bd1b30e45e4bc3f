# SPDX-License-Identifier: Apache-2.0
"""The first hour on a machine with a GPU: every check that needs no person, and a report for docs/gpus.md.

    make gpu-first-hour                       the CUDA build, then this; the report is out/gpu-first-hour.md
    python -m perf.gpu_first_hour --only real  checks whose name contains this

A check of a real model runs where its checkpoint is in the models folder; otherwise the report says that it did not. A
failed check does not end the hour. Not run on a GPU yet; the report is tested over commands of the test.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triton_omni.backends.config.paths import models_dir
from triton_omni.backends.supervisor.gpu_host import gpu_devices

ROOT = Path(__file__).resolve().parents[1]
PIPELINES = "backends/pipelines"
KEPT_LINES = 12
BY_HAND = (
    "kill the thinker's worker, then the talker's, under speech: each is back within 3 minutes",
    "an image with speech: the talker says what the thinker writes",
    "Qwen-Image, seed 42, beside diffusers with a generator on the CPU",
    "docker compose up, down, up: nothing is compiled again",
    "the deploy files for two GPUs",
)
"""Of the list, what takes a person or a second GPU."""


@dataclass(frozen=True)
class Check:
    """One thing to run. `model`: the checkpoint's folder that it needs, in the models folder."""

    name: str
    command: Sequence[str]
    timeout_s: float = 1800.0
    model: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a check; `text` are the last lines of its output, or why it did not run."""

    name: str
    state: Literal["passed", "failed", "not run"]
    seconds: float
    text: str


def checks() -> list[Check]:
    """The list, in its order; the cheap ones that explain the others come first."""

    def tests(name: str, *paths: str) -> Check:
        return Check(f"tests: {name}", [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *paths])

    versions = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0))"
    query = "index,name,memory.total,driver_version,mig.mode.current"
    omni = [sys.executable, "-m", "perf.omni", "--concurrency", "1,8", "--deploy"]
    return [
        Check("machine: GPUs", ["nvidia-smi", f"--query-gpu={query}", "--format=csv"], 60.0),
        Check("machine: compiler", ["cc", "--version"], 60.0),
        Check("machine: memory", ["free", "-g"], 60.0),
        Check("machine: disk", ["df", "-h", "."], 60.0),
        Check("torch sees the GPU", [sys.executable, "-c", versions], 300.0),
        tests("tensors between processes", "tests/unit/connectors"),
        tests("code predictor", "tests/unit/ar"),
        tests("engines", "tests/reference"),
        tests("servers", "tests/triton"),
        Check("embedded default: speech and an image", ["make", "demo"]),
        Check(
            "real Qwen3-Omni: text, speech, latency",
            [*omni, f"{PIPELINES}/qwen3_omni/deploy.yaml"],
            3600.0,
            "Qwen3-Omni-30B-A3B-Instruct",
        ),
    ]


def run_check(check: Check, models: Path) -> Outcome:
    """Run one check; whatever goes wrong with it is its outcome."""
    if check.model and not (models / check.model / "config.json").is_file():
        return Outcome(check.name, "not run", 0.0, f"no checkpoint {models.name}/{check.model}")
    began = time.monotonic()
    try:
        done = subprocess.run(
            check.command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=check.timeout_s,
        )
        state, text = ("passed" if done.returncode == 0 else "failed"), done.stdout
    except subprocess.TimeoutExpired:
        state, text = "failed", f"not done within {check.timeout_s:.0f} s"
    except OSError as error:
        state, text = "failed", str(error)
    return Outcome(check.name, state, time.monotonic() - began, "\n".join(text.strip().splitlines()[-KEPT_LINES:]))


def report(outcomes: Sequence[Outcome], revision: str, day: str) -> str:
    """The report as Markdown: a table, then what the machine and each failed check said."""
    lines = [f"### First hour on a GPU: {day}, {revision}", "", "| check | result | s |", "|---|---|---|"]
    for outcome in outcomes:
        why = f": {outcome.text}" if outcome.state == "not run" else ""
        lines.append(f"| {outcome.name} | {outcome.state}{why} | {outcome.seconds:.0f} |")
    lines += ["", "Not run, by hand:", ""] + [f"* {item}" for item in BY_HAND]
    for outcome in outcomes:
        if outcome.state == "failed" or (outcome.state == "passed" and not outcome.name.startswith("tests")):
            lines += ["", f"**{outcome.name}** ({outcome.state})", "", "```", outcome.text, "```"]
    return "\n".join(lines) + "\n"


def main(
    arguments: Sequence[str] | None = None,
    listed: Callable[[], list[Check]] = checks,
    devices: Callable[[], list[Path]] = gpu_devices,
) -> int:
    """Run the list and write the report; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-first-hour.md")
    args = parser.parse_args(arguments)
    if not devices():
        print("gpu-first-hour: no NVIDIA GPU (/dev/nvidia0); next: make test", file=sys.stderr)
        return 1
    chosen = [check for check in listed() if args.only in check.name]
    if not chosen:
        parser.error(f"--only: no check's name contains '{args.only}'")
    outcomes: list[Outcome] = []
    revision = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    for check in chosen:
        outcomes.append(run_check(check, models_dir()))
        print(f"{outcomes[-1].name}: {outcomes[-1].state} ({outcomes[-1].seconds:.0f} s)", flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)  # after each: an hour that is cut short leaves what it saw
        args.out.write_text(report(outcomes, revision.stdout.strip() or "no git", time.strftime("%Y-%m-%d")))
    print(f"report: {args.out}; paste it into docs/gpus.md")
    return int(any(outcome.state == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
