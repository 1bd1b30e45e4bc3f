# SPDX-License-Identifier: Apache-2.0
"""What clients of qwen3_omni feel through a real server, and how much of the workers' time is the engines' own.

    python -m perf.omni                           the tiny random checkpoint, on a server of its own
    python -m perf.omni --deploy FILE             what a deploy file says (the real model), on a server of its own
    python -m perf.omni --grpc localhost:8001     a running server

perf_analyzer is the client. A token is an output of the thinker, a frame one of the talker (80 ms of audio). "Outside"
is the share of a worker's working time (waiting excluded) that is not spent in `engine.step()`; of a running server it
is known where its supervisor runs on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.analyze import checked
from perf.harness import analyze, bare_server
from perf.measures import gaps_ms, percentile, summarize, trace_of
from triton_omni.backends.control.hub import probe
from triton_omni.backends.control.records import read_records
from triton_omni.backends.deploy.load import read_deploy
from triton_omni.backends.repository import write
from triton_omni.backends.supervisor.serve import run_folder

MODEL = "qwen3_omni"
TEXT = "Tell me about the sea, the sky and the old town, in a few sentences."
STAGES = ("thinker", "talker", "code2wav")
PROBE_TIMEOUT_S = 10.0
HEAD = (
    "| streams | TTFT p50 / p99 ms | TTFA p50 / p99 ms | ITL p50 / p99 ms | tokens/s | frames/s | RTF p50 | errors "
    "| outside: thinker | talker | code2wav |"
)


@dataclass(frozen=True)
class Subject:
    """A server under load. `run_dir` is None where its workers cannot be asked."""

    grpc: str
    run_dir: Path | None


@contextmanager
def temporary_server(deploy: Path) -> Iterator[Subject]:
    """A bare server with what a deploy file says."""
    with tempfile.TemporaryDirectory(prefix="omni-perf-") as folder:
        write(Path(folder), deploy)
        with bare_server([Path(folder) / read_deploy(deploy).pipeline]) as server:
            yield Subject(server.grpc, server.run_dir)


def running(grpc: str) -> Subject:
    """A running server, with its run folder if it is supervised here."""
    facts = run_folder.facts_of(grpc.rpartition(":")[2])
    return Subject(grpc, Path(facts["run_dir"]) if facts else None)


@contextmanager
def tiny(frames: int, streams: int) -> Iterator[Subject]:
    """A bare server with the tiny checkpoint, which has the real numbers of codes and codebooks."""
    from tests.kit.tiny_omni import tiny_omni

    with tempfile.TemporaryDirectory(prefix="omni-perf-") as folder:
        model = str(tiny_omni(Path(folder) / "model", real_ids=True))
        common = {"model": model, "dtype": "float32", "max_num_seqs": streams, "kv_cache_memory_bytes": 64 << 20}
        common |= {"max_model_len": 512}
        thinker = common | {"limit_mm_per_prompt": {"image": 0, "audio": 0, "video": 0}}
        talker = common | {"sampling": {"temperature": 0.0, "max_tokens": frames}}
        engines = {"thinker": thinker, "talker": talker, "code2wav": {"model": model}}
        deploy = {"pipeline": MODEL, "stages": {k: {"device": "cpu", "engine": v} for k, v in engines.items()}}
        file = Path(folder) / "deploy.yaml"
        file.write_text(json.dumps(deploy))  # JSON is YAML
        with temporary_server(file) as subject:
            yield subject


def numbers(subject: Subject) -> dict[str, dict[str, float]]:
    """What the worker of each stage has counted so far; empty where it cannot be asked."""
    if subject.run_dir is None:
        return {}
    stages = {r.model.removeprefix(f"{MODEL}_"): r.address for r in read_records(subject.run_dir) if r.role == "stage"}
    return {stage: probe(address, PROBE_TIMEOUT_S).numbers for stage, address in stages.items()}


def outside(before: dict[str, float], after: dict[str, float]) -> float:
    """Share of a worker's working time that its engine's steps did not take."""
    return 1 - (after["step_s"] - before["step_s"]) / (after["turn_s"] - before["turn_s"])


def usage(request: dict[str, Any]) -> dict[str, float]:
    """What a request of the export used, as its end says."""
    events = (json.loads(outputs.get("event") or "{}") for outputs in request["response_outputs"])
    return next((event.get("usage", {}) for event in events if event.get("type") == "end"), {})


def measure(subject: Subject, streams: int, count: int, tokens: int) -> str:
    """One load as a row of the table."""
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"messages": [{"role": "user", "content": TEXT}], "modalities": ["text", "audio"], "sampling": sampling}
    flags = ["--concurrency-range", str(streams), "--request-count", str(count)]
    before = numbers(subject)
    requests = checked(analyze(subject.grpc, MODEL, {"request": json.dumps(body)}, flags)).requests
    after = numbers(subject)
    felt = [trace_of(request) for request in requests]
    found = summarize(felt)
    gaps = [gap for one in felt for gap in gaps_ms(one.of("text"))]
    used = [usage(request) for request in requests]
    rates = [sum(one.get(kind, 0) for one in used) / found.wall_s for kind in ("completion_tokens", "audio_frames")]
    shares = [f"{outside(before[s], after[s]):.1%}" if s in before else "–" for s in STAGES]
    return (
        f"| {streams} | {found.first_text_p50_ms:.0f} / {found.first_text_p99_ms:.0f} "
        f"| {found.first_audio_p50_ms:.0f} / {found.first_audio_p99_ms:.0f} "
        f"| {percentile(gaps, 50):.1f} / {percentile(gaps, 99):.1f} | {rates[0]:.0f} | {rates[1]:.0f} "
        f"| {found.rtf_p50:.2f} | {found.errors} | {' | '.join(shares)} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deploy", type=Path, help="serve what this deploy file says")
    parser.add_argument("--grpc", help="address of a running server")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=4, help="requests per stream")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--frames", type=int, default=96, help="frames of the tiny model's answers")
    args = parser.parse_args()
    loads = [int(word) for word in args.concurrency.split(",")]
    if args.grpc:
        table(running(args.grpc), loads, args)
        return 0
    with temporary_server(args.deploy) if args.deploy else tiny(args.frames, max(loads)) as subject:
        table(subject, loads, args)
    return 0


def table(subject: Subject, loads: list[int], args: argparse.Namespace) -> None:
    measure(subject, 1, 2, args.tokens)  # links, queues and lazy set-up
    print(HEAD, "|" + "---|" * (HEAD.count("|") - 1), sep="\n")
    for streams in loads:
        print(measure(subject, streams, args.rounds * streams, args.tokens), flush=True)


if __name__ == "__main__":
    sys.exit(main())
