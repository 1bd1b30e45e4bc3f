# SPDX-License-Identifier: Apache-2.0
"""Whether steps captured as CUDA graphs compute what eager steps do. Not run on a GPU yet.

The hooks write input rows into buffers that captured steps read. Instead of trusting that on every GPU and version,
each engine compares at load.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

log = logging.getLogger("triton_omni.ar")

TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference, relative to the largest value. Padding may choose other kernels, which costs some rounding;
a graph that reads other inputs is off by about 1."""


def fall_back_if_graphs_differ(runner: GPUModelRunner) -> None:
    """Compare the largest and the smallest captured batch of each kind; where one differs, run eager from now on."""
    for mode, batches in runner.cudagraph_dispatcher.get_capture_descs():
        for batch in (batches[0], batches[-1]):
            error = _difference(runner, mode, batch)
            if error is not None:
                log.warning(
                    "a captured step of %d tokens differs from an eager one (%s): the engine runs without CUDA graphs",
                    batch.num_tokens, error,
                )  # fmt: skip
                runner.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.NONE)
                return


def _difference(runner: GPUModelRunner, mode: CUDAGraphMode, batch: BatchDescriptor) -> str | None:
    """What is wrong with a captured step; None if it equals the eager one."""
    captured, eager = (_hidden(runner, each, batch) for each in (mode, CUDAGraphMode.NONE))
    if not torch.isfinite(captured).all() and torch.isfinite(eager).all():
        return "not finite"
    error = float((captured.float() - eager.float()).abs().max() / eager.float().abs().max().clamp(min=1e-6))
    return None if error <= TOLERANCES[captured.dtype] else f"{error:.3g} of the largest value"


@torch.inference_mode()
def _hidden(runner: GPUModelRunner, mode: CUDAGraphMode, batch: BatchDescriptor) -> torch.Tensor:
    """Final hidden rows (tokens, hidden) of one step on the same random inputs each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hidden, _ = runner._dummy_run(
            batch.num_tokens,
            cudagraph_runtime_mode=mode,
            force_attention=True,
            uniform_decode=batch.uniform,
            randomize_inputs=True,
        )
    return hidden[: batch.num_tokens].clone()  # the next replay overwrites it
