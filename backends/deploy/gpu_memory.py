# SPDX-License-Identifier: Apache-2.0
"""Static check that stages which share a GPU fit its memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from triton_omni.backends.config.schema import StageDeploy

_GIGABYTE = 1e9


def gpu_memory_errors(stages: Mapping[str, StageDeploy], gpu_bytes: int) -> list[str]:
    """Errors of stages that do not fit the GPUs they are placed on; empty if all fit or nothing is known.

    gpu_bytes  memory of each GPU; 0: unknown, nothing is checked

    An instance needs `gpu_memory_bytes` on each of its GPUs. Stages that share a GPU must state it.
    """
    if not gpu_bytes:
        return []
    errors: list[str] = []
    numbers = sorted({gpu for stage in stages.values() for gpu in stage.gpus})
    for gpu in numbers:
        users = {name: stage for name, stage in stages.items() if gpu in stage.gpus}
        processes = sum(stage.instances for stage in users.values())
        silent = [name for name, stage in users.items() if not stage.gpu_memory_bytes]
        if silent and processes > 1:
            errors.append(f"GPU {gpu} is shared: gpu_memory_bytes must be set for {', '.join(silent)}")
        needed = sum(stage.instances * stage.gpu_memory_bytes for stage in users.values())
        if needed > gpu_bytes:
            parts = ", ".join(
                f"{name} {stage.instances * stage.gpu_memory_bytes / _GIGABYTE:.1f} GB" for name, stage in users.items()
            )
            errors.append(
                f"GPU {gpu} has {gpu_bytes / _GIGABYTE:.1f} GB but {needed / _GIGABYTE:.1f} GB are needed: {parts}"
            )
    return errors
