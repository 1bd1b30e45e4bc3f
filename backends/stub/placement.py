# SPDX-License-Identifier: Apache-2.0
"""Derives the workers of a stub and their GPUs from the arguments that Triton passes to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triton_omni.backends.config.schema import ConfigError, StageDeploy


def workers(args: Mapping[str, str], deploy: StageDeploy) -> dict[str, list[int]]:
    """Name → GPUs (by Triton's numbers; none on a CPU) of each worker of a stub.

    A stub has `instances` workers for each of its groups of GPUs. Triton gives a stub at most one GPU; one that places
    its workers on several is of KIND_MODEL and takes them from the deploy file.
    """
    own = instance_id(args)
    groups: list[list[int]] = [[]]
    if args["model_instance_kind"] == "GPU":
        groups = [[int(args["model_instance_device_id"])]]
    elif args["model_instance_kind"] == "MODEL":
        groups = deploy.gpu_groups
        if not groups:
            raise ConfigError(f"model {args['model_name']}: an instance of KIND_MODEL needs `gpus`")
    placed = [group for group in groups for _ in range(deploy.instances)]
    return {own if len(placed) == 1 else f"{own}.{number}": group for number, group in enumerate(placed)}


def instance_id(args: Mapping[str, str]) -> str:
    """Unique id of an instance within its model. Triton repeats one instance name on every GPU of a group."""
    number = args["model_instance_name"].removeprefix(f"{args['model_name']}_")
    return f"{number}_gpu{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else number


def visible_devices(numbers: Sequence[int], inherited: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a worker. Triton's numbers count the GPUs in its own CUDA_VISIBLE_DEVICES."""
    if inherited is None:
        return ",".join(map(str, numbers))
    names = [name.strip() for name in inherited.split(",") if name.strip()]
    hidden = [number for number in numbers if number >= len(names)]
    if hidden:
        raise ConfigError(f"`gpus` names GPU {hidden[0]}, but the server's CUDA_VISIBLE_DEVICES is '{inherited}'")
    return ",".join(names[number] for number in numbers)
