# SPDX-License-Identifier: Apache-2.0
"""Variables an AR worker must start with. Standard library only: the thin stub calls this before the worker exists.

Why each one is here (measured on the CPU build of vLLM 0.32 unless marked):

OMP_NUM_THREADS            one thread, unless deploy says `threads`: with several processes on few cores OpenMP's
                           barriers cost 5 to 30 times a decode step (13.6 ms against 474 ms on 2 shared cores)
LD_PRELOAD libiomp5        Intel's OpenMP instead of GNU's: from two threads on its barrier gives way to other
                           processes (22 against 4 tokens/s on 2 busy cores; with one thread no difference was
                           measured);
                           it can only be chosen when the process starts
TORCH_COMPILE_DISABLE      vLLM compiles one helper of `logprobs` at its first use, 18 s in which no run advances
VLLM_ENABLE_V1_MULTIPROCESSING  0: the engine lives in the worker's own loop, not in two more processes
VLLM_USE_V2_MODEL_RUNNER   0, unless set: our hooks have been run on the V1 runner only (see upstream_v2.py)
VLLM_NO_USAGE_STATS, DO_NOT_TRACK  a worker talks to nobody

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
from typing import Any

RUN_DIR = "TRITON_OMNI_RUN_DIR"  # triton_omni.backends.config's name for it, which this room may not import


def worker_environment(options: Mapping[str, Any], device: str, prefix: Path) -> dict[str, str]:
    """Variables for a worker whose interpreter lives under `prefix` (…/bin/python → …)."""
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    ranks = options.get("tensor_parallel_size", 1)
    if isinstance(ranks, int) and ranks > 1:  # what is no number is refused when the options are read
        found |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        found["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "0"
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if device == "cpu" else {}
        found |= {"TMPDIR": os.environ[RUN_DIR]} if RUN_DIR in os.environ else {}
    if device != "cpu":
        return found
    found |= {"OMP_NUM_THREADS": str(options.get("threads", 1)), "TORCH_COMPILE_DISABLE": "1"}
    openmp = prefix / "lib" / "libiomp5.so"
    preloaded = os.environ.get("LD_PRELOAD", "")
    if openmp.exists() and "omp" not in preloaded:
        found["LD_PRELOAD"] = f"{openmp}:{preloaded}" if preloaded else str(openmp)
    return found
