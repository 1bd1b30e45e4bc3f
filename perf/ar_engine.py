# SPDX-License-Identifier: Apache-2.0
"""Measure the AR engine alone: start-up, memory and tokens/s at 1, 4 and 16 runs, with and without libiomp5.

    python -m perf.ar_engine --model <checkpoint folder> [--tokens 64] [--threads 1] [--dtype bfloat16]

Each setting is a process of its own, started with the variables a worker gets; the table goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from triton_omni.backends.ar.environment import worker_environment

BATCHES = (1, 4, 16)
TIME_LIMIT_S = 900
TEXT = "Tell me about the sea, the sky and the old town, in a few sentences."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("RESULT", json.dumps(measure(args)))
        return 0
    print(
        "| OpenMP | import s | engine up s | RSS MiB | " + " | ".join(f"tok/s at {n}" for n in BATCHES) + " | ", end=""
    )
    print(" | ".join(f"step ms at {n}" for n in BATCHES) + " | share outside vLLM's step |")
    print("|" + "---|" * (2 * len(BATCHES) + 5))
    for name in ("libiomp5", "libgomp"):
        print(row(name, child(args, preload=name == "libiomp5")), flush=True)
    return 0


def child(args: argparse.Namespace, preload: bool) -> dict[str, float]:
    """The numbers of one setting, from a fresh process."""
    environment = worker_environment({"threads": args.threads}, "cpu", Path(sys.prefix))
    if not preload:
        environment.pop("LD_PRELOAD", None)
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--child"],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIME_LIMIT_S,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def row(name: str, found: dict[str, float]) -> str:
    numbers = [f"{found[key]:.1f}" for key in ("import_s", "up_s", "rss_mib")]
    numbers += [f"{found[f'rate_{n}']:.0f}" for n in BATCHES] + [f"{found[f'step_ms_{n}']:.1f}" for n in BATCHES]
    return f"| {name} | " + " | ".join(numbers) + f" | {found['outside']:.3f} |"


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Load the engine here and time it."""
    from triton_omni.backends.core.pipeline import EngineContext
    from triton_omni.backends.pipelines.chat.thinker import thinker_engine

    started = time.monotonic()
    import vllm.v1.engine.llm_engine  # noqa: F401

    found = {"import_s": time.monotonic() - started}
    started = time.monotonic()
    options = {
        "model": str(Path(args.model).resolve()),
        "dtype": args.dtype,
        "threads": args.threads,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 512 << 20,
        "enable_prefix_caching": False,
    }
    engine = thinker_engine(EngineContext("chat", "thinker", options))
    found["up_s"] = time.monotonic() - started
    outside, total = 0.0, 0.0
    batch(engine, 1, args.tokens)  # the first run ever also pays for lazy set-up inside torch
    for size in BATCHES:
        numbers = batch(engine, size, args.tokens)
        found |= {f"rate_{size}": numbers["rate"], f"step_ms_{size}": numbers["step_ms"]}
        outside, total = outside + numbers["outside_s"], total + numbers["total_s"]
    found |= {"outside": outside / total, "rss_mib": peak_rss_mib()}
    engine.close()
    return found


def batch(engine, size: int, tokens: int) -> dict[str, float]:
    """`size` runs from their opening to their end."""
    from triton_omni.backends.core.engine import Run
    from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling

    inner, spent = engine.llm.step, [0.0]

    def timed_step():
        begun = time.monotonic()
        outputs = inner()
        spent[0] += time.monotonic() - begun
        return outputs

    engine.llm.step = timed_step
    begun, steps = time.monotonic(), 0
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i in range(size):
        request = GenerateRequest(messages=(Message("user", f"{i}. {TEXT}"),), sampling=sampling)
        engine.open(Run(os.urandom(16), str(i), request, wanted=frozenset({"text"})))
    while engine.has_work:
        engine.step()
        steps += 1
    total = time.monotonic() - begun
    engine.llm.step = inner
    return {
        "rate": size * tokens / total,
        "step_ms": 1e3 * total / steps,
        "outside_s": total - spent[0],
        "total_s": total,
    }


def peak_rss_mib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
