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

from triton_omni.backends.cuda_graphs import difference

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

log = logging.getLogger("triton_omni.ar")


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
    return difference(captured, eager)


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
