# SPDX-License-Identifier: Apache-2.0
"""Context parallel: diffusers splits the tokens of a picture over the ranks, inside the transformer's stock forward.

Each rank keeps its share of image and text tokens through all blocks; in attention the ranks meet (`ulysses`: every
rank sees all tokens for some of the heads; `ring`: its own tokens see the others' in turn), and the last layer's
output is gathered on all. This is what diffusers' `enable_parallelism` does, which itself asks for an accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.diffusion.options import Parallel
from triton_omni.backends.diffusion.upstream import ContextParallelConfig, ParallelConfig, apply_context_parallel

RING_ATTENTION = "_native_flash"  # PyTorch's own; unlike its default it also says how much each token saw


def lacks(transformer: Any, parallel: Parallel, device: torch.device) -> str:
    """What keeps this transformer from being shared so, in words; empty if nothing does."""
    if getattr(transformer, "_cp_plan", None) is None:
        return f"{type(transformer).__name__} has no plan for it"
    if parallel.kind == "ring" and device.type != "cuda":
        return "kind: ring: attention that says how much each token saw exists on GPUs only"
    heads: int = transformer.config.num_attention_heads
    if parallel.kind == "ulysses" and heads % parallel.context:
        return f"kind: ulysses: {heads} attention heads cannot be shared evenly by {parallel.context}"
    return ""


def check_shareable(image_tokens: int, parallel: Parallel, device: torch.device, field: str) -> None:
    """Refuse a size that Gloo cannot gather: it wants pieces of equal size, which NCCL does not."""
    if device.type == "cpu" and image_tokens % parallel.context:
        raise BadRequest(f"{image_tokens} image tokens cannot be shared by {parallel.context} ranks on the CPU", field)


def share(transformer: Any, parallel: Parallel, device: torch.device) -> None:
    """From now on every forward is one of all ranks, which give it the same. Collective, after `ranks.join`."""
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
