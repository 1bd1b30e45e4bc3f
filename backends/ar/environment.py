# SPDX-License-Identifier: Apache-2.0
"""Variables an AR worker must start with. Standard library only: the thin stub calls this before the worker exists.

Why each one is here (measured on the CPU build of vLLM 0.32 unless marked):

OMP_NUM_THREADS            deploy's `threads`; else one on a CPU: with several processes on few cores OpenMP's barriers
                           cost 5 to 30 times a decode step (13.6 ms against 474 ms on 2 shared cores); beside a GPU
                           GPU_THREADS, which prepare media
LD_PRELOAD libiomp5        Intel's OpenMP instead of GNU's: from two threads on its barrier gives way to other
                           processes (22 against 4 tokens/s on 2 busy cores; with one thread no difference was
                           measured);
                           it can only be chosen when the process starts
TORCH_COMPILE_DISABLE      vLLM compiles one helper of `logprobs` at its first use, 18 s in which no run advances
VLLM_ENABLE_V1_MULTIPROCESSING  0: the engine lives in the worker's own loop, not in two more processes
VLLM_USE_V2_MODEL_RUNNER   deploy's `runner`, else as it is set, else 0: our hooks have been run on the V1 runner only
                           (see upstream_v2.py). A stage has a process of its own, so stages may differ
VLLM_NO_USAGE_STATS, DO_NOT_TRACK  a worker opens no connection of its own

On a GPU (read in vLLM 0.32, not run):

VLLM_BATCH_INVARIANT           1 if deploy says `batch_invariant`
VLLM_USE_FLASHINFER_SAMPLER    0, and a fixed PATH: FlashInfer is used only where nvcc and ninja are on PATH, so
                               sampling would differ between hosts and compile for minutes

With tensor_parallel_size > 1, where every rank is a process of its own (ranks.py):

VLLM_WORKER_MULTIPROC_METHOD   spawn: a forked rank would hold the worker's socket to its stub open
VLLM_HOST_IP, GLOO_SOCKET_IFNAME  ranks meet on the loopback interface
VLLM_CPU_OMP_THREADS_BIND      nobind: vLLM would want a NUMA node for each rank; `threads` counts for each
VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS  0: ranks are asked to end at once, see ranks.py
TMPDIR                         the run folder: the sockets of vLLM's queues go when it goes, also after kill -9
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

RUN_DIR = "TRITON_OMNI_RUN_DIR"  # triton_omni.backends.config's name for it, which this package may not import
GPU_THREADS = 8
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Has a C compiler, which Triton-the-language needs, and neither nvcc nor ninja."""


def worker_environment(options: Mapping[str, object], device: str, prefix: Path) -> dict[str, str]:
    """Variables for a worker whose interpreter lives under `prefix` (…/bin/python → …)."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": _v2(options.get("runner")),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    ranks = options.get("tensor_parallel_size", 1)
    if isinstance(ranks, int) and ranks > 1:  # a wrong type is refused when the options are read
        variables |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        variables["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "0"
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if device == "cpu" else {}
        variables |= {"TMPDIR": os.environ[RUN_DIR]} if RUN_DIR in os.environ else {}
    threads = options.get("threads")
    if device != "cpu":
        variables |= {"OMP_NUM_THREADS": str(threads or min(GPU_THREADS, os.cpu_count() or 1)), "PATH": SYSTEM_PATH}
        variables |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
        return variables | ({"VLLM_BATCH_INVARIANT": "1"} if options.get("batch_invariant") else {})
    variables |= {"OMP_NUM_THREADS": str(threads or 1), "TORCH_COMPILE_DISABLE": "1"}
    openmp = prefix / "lib" / "libiomp5.so"
    preloaded = os.environ.get("LD_PRELOAD", "")
    if openmp.exists() and "omp" not in preloaded:
        variables["LD_PRELOAD"] = f"{openmp}:{preloaded}" if preloaded else str(openmp)
    return variables


def _v2(runner: object) -> str:
    """VLLM_USE_V2_MODEL_RUNNER of an option `runner`; a wrong value is refused when the options are read."""
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") if runner is None else str(int(runner == "v2"))
