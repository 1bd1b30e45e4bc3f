# SPDX-License-Identifier: Apache-2.0
"""What a token of text costs each process on its way from the engine to the SSE line, on the tiny qwen3_omni.

    python -m perf.token_path [--streams 1,16] [--turns 5] [--beside "COMMAND"]

Answers of two lengths are asked for in turn. The difference of their CPU time is that of the tokens; what is left of
the shorter ones is the cost of a request. COMMAND: see perf.first_audio. Numbers are medians over turns.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from statistics import median

from perf.harness import CpuClock
from perf.versions import OWN, Side, sides

SHORT, LONG = 16, 208
HEAD = "| process | us per token | ms per request |"


def cost(side: Side, streams: int, requests: int) -> dict[str, tuple[float, float]]:
    """Process → (CPU us per token, CPU ms per request beside its tokens) of one turn; "wall" is the time of a burst."""
    spent = {tokens: _spent(side, streams, requests, tokens) for tokens in (SHORT, LONG)}
    return {role: split(spent[SHORT][role], spent[LONG][role]) for role in spent[SHORT]}


def split(short_s: float, long_s: float) -> tuple[float, float]:
    """Seconds per request with SHORT and with LONG tokens as (us per token, ms per request without its tokens)."""
    token_s = (long_s - short_s) / (LONG - SHORT)
    return 1e6 * token_s, 1e3 * (short_s - SHORT * token_s)


def _spent(side: Side, streams: int, requests: int, tokens: int) -> dict[str, float]:
    clock = CpuClock(side.processes)
    _, wall_s = asyncio.run(side.load(streams, requests, spoken=False, tokens=tokens))
    return {role: used / requests for role, used in clock.spent().items()} | {"wall": wall_s / requests}


def table(turns: Sequence[Mapping[str, tuple[float, float]]]) -> str:
    """Medians, the dearest process first; all processes and the wall clock last."""
    rows = {role: [median(turn[role][k] for turn in turns) for k in (0, 1)] for role in turns[0]}
    wall = rows.pop("wall")
    lines = [HEAD, "|---|---|---|"]
    for role, (token_us, request_ms) in sorted(rows.items(), key=lambda row: -row[1][0]):
        lines.append(f"| {role} | {token_us:.0f} | {request_ms:.1f} |")
    whole = [sum(values) for values in zip(*rows.values(), strict=True)]
    lines.append(f"| all | {whole[0]:.0f} | {whole[1]:.1f} |")
    return "\n".join([*lines, f"| wall | {wall[0]:.0f} | {wall[1]:.1f} |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default=OWN, metavar="COMMAND", help="instead of this tree's own")
    parser.add_argument("--beside", default="", metavar="COMMAND")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    with sides(args.serve, args.beside, {}, 16, args.dtype) as found:
        for side in found:
            asyncio.run(side.load(4, 8, spoken=False))
        for streams in map(int, args.streams.split(",")):
            turns = {side.name: [cost(side, streams, max(4, streams)) for _ in range(args.turns)] for side in found}
            for name, costs in turns.items():
                print(f"{name}, {streams} streams\n\n{table(costs)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
