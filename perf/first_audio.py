# SPDX-License-Identifier: Apache-2.0
"""How soon text and audio begin, and what a token costs, through the OpenAI proxy, on the tiny qwen3_omni checkpoint.

    python -m perf.first_audio                       first text and audio, requests/s, CPU per request by process
    python -m perf.first_audio --beside "COMMAND"    the same beside another version, in turn, with ratios

COMMAND serves the other version: its `serve` up to the options, such as "cd DIR && exec .runtime/engine/bin/python -m
triton_omni.cli serve". Each burst of requests arrives at once; a turn is one or more bursts, and its times are medians.
--waterfall shows where the time of single requests goes until their first audio, from spans that the server writes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from statistics import median

from perf.harness import CpuClock
from perf.paired import Better, Report, Values, alternate, compare
from perf.versions import MODEL, OWN, TOKENS, Side, sides
from perf.waterfall import milestones, table
from tests.kit.otlp_collector import Collector, collector

EXPORT_S = 15.0  # spans are exported every 5 s
SPANS = 6  # of a request: proxy, pipeline, queue and three stages

TEXT: Mapping[str, tuple[str, Better]] = {
    "requests/s": ("1/s", "higher"), "first text": ("ms", "lower"), "token": ("ms", "lower"),
    "CPU": ("ms/request", "lower"),
}  # fmt: skip
SPEECH: Mapping[str, tuple[str, Better]] = {**TEXT, "first audio": ("ms", "lower")}


def turn(side: Side, streams: int, requests: int, spoken: bool) -> Values:
    """One turn of one side: `token` is the time between two tokens of a stream, "CPU NAME" that of one process."""
    clock = CpuClock(side.processes)
    answers, wall_s = asyncio.run(side.load(streams, requests, spoken))
    spent = {f"CPU {role}": 1e3 * used / requests for role, used in clock.spent().items()}
    values = {
        "requests/s": requests / wall_s,
        "first text": _median_ms(answer.texts[0] - answer.start_s for answer in answers),
        "token": _median_ms((answer.texts[-1] - answer.texts[0]) / (TOKENS - 1) for answer in answers),
        "CPU": sum(spent.values()),
    }
    if spoken:
        values["first audio"] = _median_ms(answer.audios[0] - answer.start_s for answer in answers)
    return values | spent


def _median_ms(values: Iterable[float]) -> float:
    return 1e3 * median(values)


def measure(report: Report, found: list[Side], load: str, turns: int, requests: int) -> None:
    """Add one load, such as "speech:4", to a report."""
    kind, _, words = load.partition(":")
    streams, spoken = int(words), kind == "speech"
    count = max(requests, streams)
    taken = alternate({s.name: lambda s=s: turn(s, streams, count, spoken) for s in found}, turns)
    names, where = [side.name for side in found], f"{words} streams"
    if len(found) > 1:
        report.comparisons += compare(taken, names[0], names[1], kind, where, SPEECH if spoken else TEXT)
    for name in names:
        values = {key: median(value[key] for value in taken[name]) for key in taken[name][0]}
        cpu = ", ".join(f"{key.removeprefix('CPU ')} {value:.1f}" for key, value in values.items() if "CPU " in key)
        rest = ", ".join(f"{key} {value:.1f}" for key, value in values.items() if "CPU " not in key)
        report.facts += [(kind, f"{where}, {name}", rest), (kind, f"{where}, {name}, CPU ms/request", cpu)]


def waterfall(side: Side, receiver: Collector, requests: int) -> str:
    """Single requests of one side, step by step."""
    wall_s = time.time() - time.monotonic()
    answers = [asyncio.run(side.load(1, 1, spoken=True))[0][0] for _ in range(requests)]
    until_s = time.monotonic() + EXPORT_S
    while time.monotonic() < until_s and any(len(receiver.of(answer.trace)) < SPANS for answer in answers):
        time.sleep(0.1)
    return table(
        [
            milestones(
                receiver.of(answer.trace), MODEL,
                *(wall_s + at for at in (answer.start_s, answer.texts[0], answer.audios[0])),
            )
            for answer in answers
        ]
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default=OWN, metavar="COMMAND", help="instead of this tree's own")
    parser.add_argument("--beside", default="", metavar="COMMAND")
    parser.add_argument("--loads", default="speech:1,speech:4,speech:16,text:1,text:16", help="kind:streams, …")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="per turn, at least one per stream")
    parser.add_argument("--waterfall", type=int, default=0, metavar="REQUESTS")
    parser.add_argument("--dtype", default="float32", help="vLLM's experts in bfloat16 need AVX-512's bfloat16")
    args = parser.parse_args()
    with ExitStack() as stack:
        receiver = stack.enter_context(collector()) if args.waterfall else None
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url} if receiver else {}
        found = stack.enter_context(sides(args.serve, args.beside, variables, 16, args.dtype))
        for side in found:
            asyncio.run(side.load(4, 8, spoken=True))  # links, queues and lazy set-up
        if receiver is not None:
            for side in found:
                print(f"{side.name}:", waterfall(side, receiver, args.waterfall), sep="\n\n", end="\n\n")
        report = Report({"checkpoint": f"tiny, {args.dtype}", "turns": str(args.turns)})
        for load in filter(None, args.loads.split(",")):
            known, facts = len(report.comparisons), len(report.facts)
            measure(report, found, load, args.turns, args.requests)
            for c in report.comparisons[known:]:  # at once: a long run that is cut short has shown something
                ours, theirs = median(c.ours), median(c.theirs)
                print(f"{load} {c.quantity}: {ours:.1f} / {theirs:.1f} {c.unit}, ratio {c.ratio:.2f}", flush=True)
            for _, name, value in report.facts[facts:]:
                print(f"  {name}: {value}", flush=True)
        print(report.markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
