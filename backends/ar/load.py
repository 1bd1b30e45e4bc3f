# SPDX-License-Identifier: Apache-2.0
"""Options → a running vLLM LLMEngine in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import msgspec
import torch
from vllm import envs
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.engine.llm_engine import LLMEngine

from triton_omni.backends.ar.options import ArOptions, checkpoint
from triton_omni.backends.ar.ranks import check_ranks, reasons_of_ranks, watch_ranks
from triton_omni.backends.ar.upstream import RANK_WORKER
from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.pipeline import EngineContext

OURS = frozenset(
    {"model", "threads", "sampling", "vllm", "batch_invariant", "runner", "hf_overrides", "limit_mm_per_prompt"}
)
"""Options that are not handed to vLLM under their own name."""
FIXED_KV_UTILIZATION = 0.01
"""gpu_memory_utilization beside a KV cache of fixed size. vLLM then only checks at start that this share of the GPU is
free; its own default fails wherever another process holds memory."""


def load_llm(options: ArOptions, context: EngineContext, needed: Mapping[str, object] | None = None) -> LLMEngine:
    """Load weights and allocate the KV cache; whatever stops it is raised in vLLM's words or ours.

    `needed` are EngineArgs that the pipeline cannot do without; they beat the deploy file.
    """
    assert not envs.VLLM_ENABLE_V1_MULTIPROCESSING, (
        "start the worker with the variables of triton_omni.backends.ar.environment"
    )
    if current_platform.device_type != context.device:
        raise OptionsError(
            f"stage '{context.stage}' is to run on {context.device}, but the installed vLLM is built for "
            f"{current_platform.device_type}"
        )
    check_runner(options, context)
    ranks = options.tensor_parallel_size * options.vllm.get("pipeline_parallel_size", 1)
    if needed and ranks > options.tensor_parallel_size:
        raise OptionsError(f"stage '{context.stage}': pipeline_parallel_size must be 1, every rank needs all rows")
    check_ranks(ranks, torch.cuda.device_count() if context.device == "cuda" else None, context.stage)
    arguments: dict[str, Any] = {"worker_cls": RANK_WORKER} | engine_arguments(options, context) | dict(needed or {})
    with reasons_of_ranks(context.stage) if ranks > 1 else nullcontext():
        llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
    watch_ranks(llm.model_executor)
    return llm


def check_runner(options: ArOptions, context: EngineContext) -> None:
    """Raise OptionsError for a model runner that this process, the device or the installed vLLM does not have."""
    if _runner(options) == "v2" and not HAS_TRITON:
        raise OptionsError(
            f"stage '{context.stage}': runner 'v2' needs the Triton language on its device, which {context.device} "
            "does not have here; set 'runner: v1' or leave it out, or run the stage on a GPU"
        )
    if options.runner is not None and (options.runner == "v2") != bool(envs.VLLM_USE_V2_MODEL_RUNNER):
        raise OptionsError(
            f"stage '{context.stage}': runner '{options.runner}', but this process was started with "
            f"VLLM_USE_V2_MODEL_RUNNER={os.environ.get('VLLM_USE_V2_MODEL_RUNNER')}"
        )


def _runner(options: ArOptions) -> str:
    return options.runner or ("v2" if envs.VLLM_USE_V2_MODEL_RUNNER else "v1")


def engine_arguments(options: ArOptions, context: EngineContext) -> dict[str, object]:
    """EngineArgs by name; what is None is left to vLLM."""
    values = {
        key: value for key, value in msgspec.structs.asdict(options).items() if key not in OURS and value is not None
    }
    values["model"] = checkpoint(options, context.models_dir)
    values.setdefault("enforce_eager", context.device == "cpu" or _runner(options) == "v2")
    if options.kv_cache_memory_bytes is not None:
        values.setdefault("gpu_memory_utilization", FIXED_KV_UTILIZATION)
    if options.batch_invariant and context.device == "cpu":
        if options.dtype not in ("auto", "float32"):
            raise OptionsError(
                f"stage '{context.stage}': batch_invariant needs dtype float32 on a CPU (got {options.dtype})"
            )
        values["dtype"] = "float32"
    if options.hf_overrides:
        values["hf_overrides"] = options.hf_overrides
    if options.limit_mm_per_prompt:
        values["limit_mm_per_prompt"] = options.limit_mm_per_prompt
    fixed = {
        "disable_log_stats": True,
        "async_scheduling": False,  # on by default on CUDA; not run there yet
        # the first request that needs a grammar would choose for all, and forced calls are written for this one; with
        # any white space allowed, a greedy model may write nothing else until max_tokens
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True),
    }
    return values | fixed | options.vllm
