# SPDX-License-Identifier: Apache-2.0
"""Measure qwen3_omni's engines in one process: times to first text and audio, rates, and the time outside the steps.

    python -m perf.omni_chain                       the tiny random checkpoint, made on the spot
    python -m perf.omni_chain --model <folder> --device cuda --dtype bfloat16
    python -m perf.omni_chain --ranks 2             thinker and talker on two ranks each; 0: on one, in its own process

Without links and server: what the engines alone can do. The three engines take turns here, on a server they do not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.kit.engine_chain import Chain
from triton_omni.backends.ar.environment import worker_environment
from triton_omni.backends.core.engine import EngineChunk, EngineOutput
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE

SAMPLE_RATE_HZ = 24_000
TEXT = "Tell me about the sea, the sky and the old town, in a few sentences."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: the tiny one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--frames", type=int, default=96)
    parser.add_argument("--ranks", type=int, help="processes of thinker and of talker; default: one, in this process")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it would write between the rows of the table
    several = {} if args.ranks is None else {"tensor_parallel_size": 2}  # one in a process of its own needs the same
    os.environ.update(worker_environment(several, args.device, Path(sys.prefix)))
    with tempfile.TemporaryDirectory() as folder:
        chain = make_chain(args, args.model or tiny(Path(folder)))
        measure(chain, 1, args)  # the first run ever pays for lazy set-up
        print("| runs | text after ms | audio after ms | ms per token | tokens/s | frames/s | RTF | outside steps |")
        print("|---|---|---|---|---|---|---|---|")
        for size in args.batches:
            print(measure(chain, size, args), flush=True)
        chain.close()
    return 0


def tiny(folder: Path) -> Path:
    """The checkpoint with the real numbers of codes and codebooks."""
    from tests.kit.tiny_omni import tiny_omni

    return tiny_omni(folder, real_ids=True)


def make_chain(args: argparse.Namespace, model: Path) -> Chain:
    """All three stages, with room for the largest batch."""
    common = {"model": str(model), "dtype": args.dtype, "max_num_seqs": max(args.batches), "max_model_len": 1024}
    common |= {"kv_cache_memory_bytes": 256 << 20}
    if args.ranks is not None:
        common |= {"tensor_parallel_size": args.ranks or 1, "vllm": {"distributed_executor_backend": "mp"}}
    options = {
        "thinker": common | {"limit_mm_per_prompt": {"image": 0, "audio": 0, "video": 0}},
        "talker": common | {"sampling": {"temperature": 0.0, "max_tokens": args.frames}},
        "code2wav": {"model": str(model)},
    }
    contexts = {name: EngineContext(PIPELINE.name, name, given, args.device) for name, given in options.items()}
    return Chain(PIPELINE, {name: PIPELINE.stage(name).engine(context) for name, context in contexts.items()})


def measure(chain: Chain, size: int, args: argparse.Namespace) -> str:
    """`size` requests from their opening to the end of their audio, as a row of the table."""
    inside: Counter[str] = Counter()
    stamps: dict[tuple[int, str], list[float]] = {}
    timed(chain, inside, stamps)
    begun = time.monotonic()
    for place in range(size):
        request = GenerateRequest(
            messages=(Message("user", f"{place}. {TEXT}"),),
            sampling=Sampling(temperature=0.0, max_tokens=args.tokens, ignore_eos=True),
        )
        chain.open(request)
    jobs = list(chain.jobs)
    chain.run()
    total = time.monotonic() - begun
    for engine in chain.engines.values():
        del engine.step  # type: ignore[attr-defined] - back to the class's own
    texts = [stamps[id(job.runs["thinker"]), "thinker"] for job in jobs]
    audio = [stamps[id(job.runs["code2wav"]), "code2wav"] for job in jobs]
    gaps = [b - a for times in texts for a, b in itertools.pairwise(times)]
    frames = sum(len(job.sent("talker", "codes")) for job in jobs)
    spoken_s = sum(len(job.audio()) for job in jobs) / SAMPLE_RATE_HZ
    numbers = [
        1e3 * (statistics.median(times[0] for times in texts) - begun),
        1e3 * (statistics.median(times[0] for times in audio) - begun),
        1e3 * statistics.median(gaps),
        sum(len(job.tokens()) for job in jobs) / total,
        frames / total,
    ]
    columns = [f"{number:.0f}" if number >= 10 else f"{number:.1f}" for number in numbers]
    return f"| {size} | {' | '.join(columns)} | {total / spoken_s:.2f} | {1 - inside.total() / total:.1%} |"


def timed(chain: Chain, inside: Counter[str], stamps: dict[tuple[int, str], list[float]]) -> None:
    """Note when every output came, and how long all steps took together."""
    for name, engine in chain.engines.items():

        def step(name: str = name, inner=engine.step):
            begun = time.monotonic()
            events = inner()
            now = time.monotonic()
            inside[name] += now - begun  # type: ignore[assignment]
            for event in events:
                if isinstance(event, EngineOutput | EngineChunk):
                    stamps.setdefault((id(event.run), name), []).append(now)
            return events

        engine.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
