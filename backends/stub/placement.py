# SPDX-License-Identifier: Apache-2.0
"""Derives a stub's instance id and its worker's GPUs from the arguments that Triton passes to a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from triton_omni.backends.config.schema import ConfigError, StageDeploy


def instance_id(args: Mapping[str, str]) -> str:
    """Unique id of an instance within its model. Triton repeats one instance name on every GPU of a group."""
    number = args["model_instance_name"].removeprefix(f"{args['model_name']}_")
    return f"{number}_gpu{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else number


def gpus(args: Mapping[str, str], deploy: StageDeploy) -> list[int]:
    """The instance's GPUs by Triton's numbers; empty if it runs on the CPU.

    Triton assigns at most one GPU per instance. An instance with several is of KIND_MODEL; the index of its instance
    group selects its GPUs from the deploy file.
    """
    if args["model_instance_kind"] == "GPU":
        return [int(args["model_instance_device_id"])]
    if args["model_instance_kind"] != "MODEL":
        return []
    names = [group["name"] for group in json.loads(args["model_config"])["instance_group"]]
    index = names.index(args["model_instance_name"].rpartition("_")[0])
    groups = deploy.gpu_groups
    if index >= len(groups):
        raise ConfigError(f"model {args['model_name']}: `gpus` has no GPU for instance group {index}")
    return groups[index]


def visible_devices(numbers: Sequence[int], inherited: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a worker. Triton's numbers count the GPUs in its own CUDA_VISIBLE_DEVICES."""
    if inherited is None:
        return ",".join(map(str, numbers))
    names = [name.strip() for name in inherited.split(",") if name.strip()]
    hidden = [number for number in numbers if number >= len(names)]
    if hidden:
        raise ConfigError(f"`gpus` names GPU {hidden[0]}, but the server's CUDA_VISIBLE_DEVICES is '{inherited}'")
    return ",".join(names[number] for number in numbers)
