# SPDX-License-Identifier: Apache-2.0
"""Which instance a stub is and which GPUs its worker gets, out of what Triton tells a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from triton_omni.backends.config.schema import ConfigError, StageDeploy


def instance_id(args: Mapping[str, str]) -> str:
    """What tells an instance from the model's others. Triton gives the same name once on every GPU of a group."""
    number = args["model_instance_name"].removeprefix(f"{args['model_name']}_")
    return f"{number}_gpu{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else number


def gpus(args: Mapping[str, str], deploy: StageDeploy) -> list[int]:
    """The instance's GPUs by Triton's numbers; none: it runs on the CPU.

    Triton gives an instance one GPU at most. One with several is of KIND_MODEL, and its group's place among the
    groups says which of the deploy file's GPUs are its own.
    """
    if args["model_instance_kind"] == "GPU":
        return [int(args["model_instance_device_id"])]
    if args["model_instance_kind"] != "MODEL":
        return []
    names = [group["name"] for group in json.loads(args["model_config"])["instance_group"]]
    place = names.index(args["model_instance_name"].rpartition("_")[0])
    groups = deploy.gpu_groups
    if place >= len(groups):
        raise ConfigError(f"model {args['model_name']}: `gpus` has no GPU for instance group {place}")
    return groups[place]


def visible_devices(numbers: Sequence[int], inherited: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a worker: Triton counts only what its own variable lets it see."""
    if inherited is None:
        return ",".join(map(str, numbers))
    names = [name.strip() for name in inherited.split(",") if name.strip()]
    hidden = [number for number in numbers if number >= len(names)]
    if hidden:
        raise ConfigError(f"`gpus` names GPU {hidden[0]}, but the server's CUDA_VISIBLE_DEVICES is '{inherited}'")
    return ",".join(names[number] for number in numbers)
