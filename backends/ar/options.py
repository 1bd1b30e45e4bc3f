# SPDX-License-Identifier: Apache-2.0
"""The `engine:` section of an AR stage in deploy.yaml, typed; every default is here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from triton_omni.backends.core.engine import OptionsError, read_engine_options

Count = Annotated[int, msgspec.Meta(ge=1)]
Bytes = Annotated[int, msgspec.Meta(ge=1)]


class SamplingDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request that says nothing gets; None leaves it to the model's generation_config, then to vLLM."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    max_tokens: Count | None = None
    seed: int | None = None


class ArOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How vLLM runs one checkpoint; names and meanings are vLLM's where it has them.

    model        folder with a checkpoint; a relative name is looked up in the models folder
    threads      OpenMP threads (read by environment.py, before this process exists); None: one on a CPU
    sampling     defaults for requests
    kv_cache_memory_bytes   fixed size of the KV cache: also saves the memory-profiling run at start
    gpu_memory_utilization  share of the GPU that must be free at start; None: what vLLM wants, or almost nothing if the
                            KV cache has a fixed size, so that stages can share a GPU and restart beside each other
    scheduling_policy       "priority" honours the request's priority; equal priorities are first come, first served
    runner                  vLLM's model runner: "v1", or "v2" where vLLM has it for the device; None: that of variable
                            VLLM_USE_V2_MODEL_RUNNER, else v1 (read by environment.py, before this process exists)
    enforce_eager           steps without CUDA graphs; None: on a CPU, and with runner v2, whose captured steps are not
                            compared with eager ones at start
    batch_invariant         the tokens of a run do not depend on the runs beside it: float32 on a CPU, vLLM's
                            batch-invariant kernels on a GPU (docs/operations.md says what it costs)
    vllm         further EngineArgs by name, for what has no key of its own here
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    threads: Count | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count = 16
    max_num_batched_tokens: Count | None = None
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    kv_cache_memory_bytes: Bytes | None = None
    block_size: Count | None = None
    tensor_parallel_size: Count = 1
    quantization: str | None = None
    runner: Literal["v1", "v2"] | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool = True
    batch_invariant: bool = False
    scheduling_policy: str = "priority"
    seed: int = 0
    trust_remote_code: bool = False
    load_format: str = "auto"
    revision: str | None = None
    hf_overrides: dict[str, object] = {}
    limit_mm_per_prompt: dict[str, int] = {}
    sampling: SamplingDefaults = SamplingDefaults()
    vllm: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must name a checkpoint folder")
        if self.scheduling_policy not in ("priority", "fcfs"):
            raise ValueError(f"scheduling_policy must be 'priority' or 'fcfs', not '{self.scheduling_policy}'")


def read_options(options: Mapping[str, object], stage: str) -> ArOptions:
    """Typed options; raises OptionsError naming the stage, the key and the nearest known key."""
    return read_engine_options(options, ArOptions, stage)


def checkpoint(options: ArOptions, models_dir: str) -> str:
    """The checkpoint's folder as vLLM takes it.

    A name that is no folder is handed on as a hub name, unless HF_HUB_OFFLINE says that there is no hub.
    """
    is_path = Path(options.model).is_absolute() or options.model.startswith(".")
    if not Path(models_dir, options.model).is_dir() and not is_path and os.environ.get("HF_HUB_OFFLINE") != "1":
        return options.model
    return str(checkpoint_folder(options.model, models_dir))


def checkpoint_folder(model: str, models_dir: str) -> Path:
    """The folder, complete as far as its own index says; raises OptionsError naming what lacks."""
    folder = Path(models_dir, model)
    if not folder.is_dir():
        raise OptionsError(f"model '{model}': there is no folder {folder}")
    if not (folder / "config.json").is_file():
        raise OptionsError(f"model '{model}': {folder / 'config.json'} is missing")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise OptionsError(f"model '{model}': {len(missing)} weight file(s) missing: {missing[0]} …")
    return folder
