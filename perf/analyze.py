# SPDX-License-Identifier: Apache-2.0
"""Run the real perf_analyzer on pipelines and print a table of what clients felt, beside the engines in one process.

    python -m perf.analyze [--pipelines toy,chat] [--concurrency 1,4,16,64] [--rounds 2] [--out perf/results]

The request of a pipeline is perf/inputs/<pipeline>.json. CPU per piece is what the processes used over the whole run
of perf_analyzer, idle moments included, over the pieces that clients got.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from perf import inprocess
from perf.harness import Analysis, Server, analyze, bare_server, repository, request_json, request_only
from perf.measures import Piece, RequestTrace, Summary, percentile, summarize, trace_of
from triton_omni.backends.pipelines import load
from triton_omni.backends.supervisor.home import find_home

INPROCESS_TIMEOUT_S = 1800.0
HEAD = (
    "| | concurrency | requests/s | first text p50 / p99 ms | first audio p50 / p99 ms | pieces/s | gap p99 ms "
    "| RTF p50 | underrun max ms | continuous | errors | CPU ms/piece: orchestrator | stage stubs | workers |"
)
SHARED = ("--shared-memory", "system", "--output-shared-memory-size", str(1 << 20))


def row(name: str, concurrency: int, found: Summary, cpu_s: dict[str, float] | None, pipeline: str) -> str:
    """One load as a line of the table."""
    cpu = "| – | – | – |"
    if cpu_s is not None and found.pieces:
        front = cpu_s[f"{pipeline} stub"]
        stubs = sum(s for role, s in cpu_s.items() if role.endswith(" stub")) - front
        workers = sum(s for role, s in cpu_s.items() if role.endswith(" worker"))
        cpu = "| " + " | ".join(f"{1e3 * s / found.pieces:.3f}" for s in (front, stubs, workers)) + " |"
    return (
        f"| {name} | {concurrency} | {found.requests_per_s:.2f} "
        f"| {found.first_text_p50_ms:.1f} / {found.first_text_p99_ms:.1f} "
        f"| {found.first_audio_p50_ms:.1f} / {found.first_audio_p99_ms:.1f} "
        f"| {found.pieces_per_s:.0f} | {found.gap_p99_ms:.1f} | {found.rtf_p50:.2f} | {found.underrun_max_ms:.0f} "
        f"| {found.continuity:.2f} | {found.errors} {cpu}"
    )


def load_server(server: Server, pipeline: str, concurrency: int, count: int) -> tuple[Summary, dict[str, float]]:
    """One load through the server."""
    body = request_json(pipeline)
    flags = ["--concurrency-range", str(concurrency), "--request-count", str(count)]
    analysis = checked(analyze(server.grpc, pipeline, {"request": body}, flags, server.pids()))
    return summarize([trace_of(request) for request in analysis.requests]), analysis.cpu_s


def checked(analysis: Analysis) -> Analysis:
    if analysis.exit_code or not analysis.requests:
        raise RuntimeError(f"perf_analyzer ended with {analysis.exit_code}:\n{analysis.text}")
    return analysis


def baseline(pipeline: str, loads: Sequence[tuple[int, int]]) -> list[Summary]:
    """The same loads on the same engines in one process of their own."""
    with tempfile.TemporaryDirectory(prefix="omni-perf-") as folder:
        out = Path(folder) / "requests.json"
        words = [str(find_home().engine_python), "-m", "perf.inprocess", pipeline]
        words += ["--loads", json.dumps(loads), "--out", str(out)]
        variables = os.environ | inprocess.environment(load(pipeline))
        subprocess.run(words, env=variables, check=True, timeout=INPROCESS_TIMEOUT_S, stdout=subprocess.DEVNULL)
        return [summarize([_job(job) for job in jobs]) for jobs in json.loads(out.read_text())]


def _job(values: dict) -> RequestTrace:
    return RequestTrace(values["start_s"], [Piece(**p) for p in values["pieces"]], values["end_s"], values["completed"])


def measure(pipeline: str, concurrencies: Sequence[int], rounds: int) -> list[str]:
    """The table of one pipeline."""
    loads = [(c, max(4, rounds * c)) for c in concurrencies]
    alone = baseline(pipeline, loads)
    lines = [f"## {pipeline}", "", HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    with bare_server([repository(pipeline)]) as server:
        load_server(server, pipeline, 1, 2)  # links, queues and lazy set-up
        for (concurrency, count), one_process in zip(loads, alone, strict=True):
            found, cpu_s = load_server(server, pipeline, concurrency, count)
            lines.append(row("server", concurrency, found, cpu_s, pipeline))
            lines.append(row("one process", concurrency, one_process, None, pipeline))
            lines.append(
                f"| ratio of requests/s | {concurrency} | {found.requests_per_s / one_process.requests_per_s:.2f} |"
            )
            print("\n".join(lines[-3:]), file=sys.stderr, flush=True)
    return lines


def shared_memory(concurrency: int) -> list[str]:
    """Toy's public model with and without shared memory, and one stage called directly; perf_analyzer's own figures."""
    lines = ["## toy: shared memory, and one stage alone", "", HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    body = request_json("toy")
    load_flags = ["--concurrency-range", str(concurrency), "--request-count", str(4 * concurrency)]
    with (
        tempfile.TemporaryDirectory(prefix="omni-perf-") as folder,
        bare_server([request_only("toy", Path(folder))]) as server,
    ):
        for name, model in (("public model, gRPC messages", "toy"), ("one stage alone", "toy_tokens")):
            analysis = checked(analyze(server.grpc, model, {"request": body}, load_flags, server.pids()))
            lines.append(
                row(name, concurrency, summarize(list(map(trace_of, analysis.requests))), analysis.cpu_s, "toy")
            )
        # with shared memory the export has the times only
        requests = checked(analyze(server.grpc, "toy", {"request": body}, [*load_flags, *SHARED])).requests
        first = [(r["response_timestamps"][0] - r["timestamp"]) / 1e6 for r in requests]
        responses = sum(len(r["response_timestamps"]) for r in requests)
        lines += ["", f"Public model, system shared memory: {len(requests)} requests, {responses} responses, "]
        lines[-1] += f"first response p50 {percentile(first, 50):.1f} ms, p99 {percentile(first, 99):.1f} ms."
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", default="toy,chat")
    parser.add_argument("--concurrency", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=2, help="requests per stream")
    parser.add_argument("--out", type=Path, help="folder for the tables; default: standard output")
    args = parser.parse_args()
    concurrencies = [int(word) for word in args.concurrency.split(",")]
    for pipeline in args.pipelines.split(","):
        lines = measure(pipeline, concurrencies, args.rounds)
        if pipeline == "toy":
            lines += ["", *shared_memory(4)]
        text = "\n".join(lines) + "\n"
        if args.out is None:
            print(text)
        else:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{pipeline}.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
