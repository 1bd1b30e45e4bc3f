# SPDX-License-Identifier: Apache-2.0
"""Steps of a network recorded as CUDA graphs, and whether a replay computes what an eager step does. Not run on a GPU.

A recorded step reads and writes the same memory each time: its caller copies inputs in, replays, and copies out what
must outlive the next replay. A graph is not taken on trust: at load each is compared with an eager step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Step = Callable[[], Sequence[torch.Tensor]]
"""Computes outputs from tensors that stay the same objects."""
Recorder = Callable[[Step], tuple[Callable[[], None], Sequence[torch.Tensor]]]
"""Records a step: its replay, and the tensors that each replay writes."""


class NotCapturedError(RuntimeError):
    """A graph computes something else than eager steps. CUDA's own errors of a capture are RuntimeErrors too."""


TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference, relative to the largest value. Padding may choose other kernels, which costs some rounding;
a graph that reads other inputs is off by about 1."""
WARM_UP_STEPS = 3
"""Steps before the recorded one: libraries choose kernels and allocate at first use, which a graph must not record."""


def record_cuda_graph(step: Step) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
    """The Recorder of GPUs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_STEPS):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = step()
    return graph.replay, written


def difference(captured: torch.Tensor, eager: torch.Tensor) -> str | None:
    """What is wrong with a captured step's output; None if it equals the eager one's within rounding."""
    if not torch.isfinite(captured).all() and torch.isfinite(eager).all():
        return "not finite"
    error = float((captured.float() - eager.float()).abs().max() / eager.float().abs().max().clamp(min=1e-6))
    return None if error <= TOLERANCES[captured.dtype] else f"{error:.3g} of the largest value"


def batch_sizes(largest: int) -> list[int]:
    """Powers of two below `largest`, and `largest`: smaller batches are filled up to the next one."""
    return [2**power for power in range((largest - 1).bit_length())] + [largest]
