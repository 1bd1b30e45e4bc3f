# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: diffusers splits the tokens of an image over the ranks inside the transformer's stock forward.

Each rank keeps its share of image and text tokens through all blocks. Attention exchanges data (`ulysses`: every rank
sees all tokens for some of the heads; `ring`: its own tokens see the others' in turn), and the output of the last layer
is gathered on all ranks. This is what diffusers' `enable_parallelism` does, except that it requires an accelerator.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.diffusion.options import ParallelOptions
from triton_omni.backends.diffusion.upstream import (
    ContextParallelConfig,
    ParallelConfig,
    QwenImageTransformer2DModel,
    apply_context_parallel,
)

RING_ATTENTION = "_native_flash"  # PyTorch's own; unlike its default it returns the log-sum-exp that ring needs


def unsupported_reason(
    transformer: QwenImageTransformer2DModel, parallel: ParallelOptions, device: torch.device
) -> str:
    """Why this transformer cannot be split over ranks; empty if it can."""
    if getattr(transformer, "_cp_plan", None) is None:
        return f"{type(transformer).__name__} has no context parallel plan"
    if parallel.kind == "ring" and device.type != "cuda":
        return "kind: ring: its attention kernel exists on GPUs only"
    heads: int = transformer.config["num_attention_heads"]
    if parallel.kind == "ulysses" and heads % parallel.context:
        return f"kind: ulysses: {heads} attention heads are not divisible by {parallel.context} ranks"
    return ""


def check_divisible(image_tokens: int, parallel: ParallelOptions, device: torch.device, field: str) -> None:
    """Refuse sizes that Gloo cannot gather: unlike NCCL it needs pieces of equal size."""
    if device.type == "cpu" and image_tokens % parallel.context:
        raise BadRequest(
            f"{image_tokens} image tokens are not divisible by {parallel.context} ranks, as the CPU requires", field
        )


def enable(transformer: QwenImageTransformer2DModel, parallel: ParallelOptions, device: torch.device) -> None:
    """Split every forward over all ranks, which call it with equal inputs. Collective, after `ranks.join`."""
    ring = parallel.kind == "ring"
    context = ContextParallelConfig(
        ring_degree=parallel.context if ring else 1,
        ulysses_degree=1 if ring else parallel.context,
        ring_anything=ring,  # texts of any length
        ulysses_anything=not ring,
    )
    mesh = init_device_mesh(device.type, context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(torch.distributed.get_rank(), parallel.context, device, mesh=mesh)
    if ring:
        transformer.set_attention_backend(RING_ATTENTION)
    for module in transformer.modules():
        processor = getattr(module, "processor", None)
        if hasattr(processor, "_parallel_config"):
            processor._parallel_config = config  # pyright: ignore[reportOptionalMemberAccess]
    apply_context_parallel(transformer, context, transformer._cp_plan)
