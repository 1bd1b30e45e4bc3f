# SPDX-License-Identifier: Apache-2.0
"""Measure how chunks travel: through the whole toy pipeline, and over one bare connector.

    python -m perf.transport [--streams 64] [--chunks 2000] [--bytes 4096] [--repeat 3] [--prototype DIR]
    python -m perf.transport --connector

Through the pipeline every chunk crosses two hops between three workers; 200 audio and 100 text pieces of each
stream of 2000 go to the client, which is perf_analyzer. `--prototype DIR` runs the transport prototype of the design
phase (gen_repo.py, models/, seqlink.py in DIR) on the same server build, alternating with ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from perf import connector
from perf.harness import Server, analyze, bare_server, repository

AUDIO_EVERY, TEXT_EVERY = 10, 20
PROTOTYPE_MODELS = "orch_q2a,a,b,c"


@dataclass(frozen=True)
class Subject:
    """One of the things compared: a model on a server and what to ask of it."""

    name: str
    server: Server
    model: str
    inputs: dict[str, str]


@dataclass(frozen=True)
class Passage:
    """One load of all streams. `cpu_s` is per process role."""

    wall_s: float
    chunks: int
    pieces: int
    cpu_s: dict[str, float]

    @property
    def chunks_per_s(self) -> float:
        return self.chunks / self.wall_s


def load(subject: Subject, streams: int, chunks: int) -> Passage:
    """All streams at once; RuntimeError unless each got exactly what it should."""
    flags = ["--concurrency-range", str(streams), "--request-count", str(streams)]
    analysis = analyze(subject.server.grpc, subject.model, subject.inputs, flags, subject.server.pids())
    requests = analysis.requests
    expected = -(-chunks // AUDIO_EVERY) + -(-chunks // TEXT_EVERY) + 1
    counts = [len(r["response_timestamps"]) for r in requests]
    if counts != [expected] * streams:
        raise RuntimeError(f"{subject.name}: {counts} responses, not {expected} each\n{analysis.text}")
    first = min(r["timestamp"] for r in requests)
    last = max(r["response_timestamps"][-1] for r in requests)
    return Passage((last - first) / 1e9, streams * chunks, streams * (expected - 1), analysis.cpu_s)


def toy(server: Server, chunks: int, frame_bytes: int) -> Subject:
    stages: dict[str, Any] = {
        "tokens": {"frame_bytes": frame_bytes, "output_every": TEXT_EVERY},
        "frames": {"frame_bytes": frame_bytes},
        "wave": {"output_every": AUDIO_EVERY},
    }
    body = {
        "messages": [{"role": "user", "content": "go"}],
        "modalities": ["text", "audio"],
        "sampling": {"max_tokens": chunks},
        "stages": stages,
    }
    return Subject("toy", server, "toy", {"request": json.dumps(body)})


@contextmanager
def prototype(folder: Path, chunks: int, size: int) -> Iterator[Subject]:
    """The prototype on a server of its own."""
    with tempfile.TemporaryDirectory(prefix="omni-perf-") as scratch:
        run, models = Path(scratch) / "run", Path(scratch) / "models"
        run.mkdir()
        subprocess.run([sys.executable, str(folder / "gen_repo.py"), str(models), "1", PROTOTYPE_MODELS], check=True)
        variables = {"G_PROTO": str(folder), "G_RUN": str(run), "PYTHONDONTWRITEBYTECODE": "1"}
        body = {"n": chunks, "size": size, "audio_every": AUDIO_EVERY, "text_every": TEXT_EVERY}
        with bare_server([models], variables) as server:
            yield Subject("prototype", server, "orch_q2a", {"REQ": json.dumps(body)})


def row(subject: Subject, passage: Passage, orchestrator: str) -> str:
    """One line of the table: throughput, and CPU per chunk of each role in microseconds."""
    rest = {role: s for role, s in passage.cpu_s.items() if role != orchestrator}
    workers = ", ".join(f"{role} {1e6 * s / passage.chunks:.0f}" for role, s in rest.items())
    share = 1e3 * passage.cpu_s[orchestrator] / passage.pieces
    return (
        f"| {subject.name} | {passage.wall_s:.1f} | {passage.chunks_per_s:.0f} | {passage.pieces / passage.wall_s:.0f} "
        f"| {share:.3f} | {workers} |"
    )


def compare(subjects: list[Subject], args: argparse.Namespace) -> None:
    """Alternate the subjects, print every passage and the median ratio of neighbours."""
    print(f"{args.streams} streams x {args.chunks} chunks of {args.bytes} bytes, perf_analyzer as the client\n")
    print("| | wall s | chunks/s | pieces/s | orchestrator CPU ms/piece | CPU us/chunk of the others |")
    print("|---|---|---|---|---|---|")
    rates: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    cpu_us: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for _ in range(args.repeat):
        for subject in subjects:
            passage = load(subject, args.streams, args.chunks)
            print(row(subject, passage, f"{subject.model} stub"), flush=True)
            rates[subject.name].append(passage.chunks_per_s)
            cpu_us[subject.name].append(1e6 * sum(passage.cpu_s.values()) / passage.chunks)
    if len(subjects) == 2:
        ours, theirs = (subject.name for subject in subjects)
        pairs = [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]
        print(
            f"\n{median(pairs):.2f} of the prototype's chunks/s (median of {len(pairs)} pairs); CPU per chunk in all: "
        )
        print(f"{median(cpu_us[ours]):.0f} us, the prototype {median(cpu_us[theirs]):.0f} us (medians)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=2000)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--prototype", type=Path)
    parser.add_argument("--connector", action="store_true", help="only the bare connector")
    args = parser.parse_args()
    if args.connector:
        connector.table()
        return 0
    with bare_server([repository("toy")]) as server:
        ours = toy(server, args.chunks, args.bytes)
        if args.prototype is None:
            compare([ours], args)
        else:
            with prototype(args.prototype.resolve(), args.chunks, args.bytes) as theirs:
                compare([ours, theirs], args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
