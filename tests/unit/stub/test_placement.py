# SPDX-License-Identifier: Apache-2.0
"""Instances and GPUs: what Triton tells a stub, and what the worker is shown of it."""

from __future__ import annotations

import json

import pytest

from triton_omni.backends.config.schema import ConfigError, StageDeploy
from triton_omni.backends.stub.placement import gpus, instance_id, visible_devices


def arguments(kind, device=0, name="m_x_0_0", groups=("m_x_0",)):
    config = {"instance_group": [{"name": group} for group in groups]}
    return {
        "model_name": "m_x", "model_instance_name": name, "model_instance_kind": kind,
        "model_instance_device_id": str(device), "model_config": json.dumps(config),
    }  # fmt: skip


def test_one_group_on_two_gpus_has_two_ids():
    """Triton calls both m_x_0_0."""
    assert {instance_id(arguments("GPU", device)) for device in (0, 1)} == {"0_0_gpu0", "0_0_gpu1"}


def test_groups_and_their_members_have_ids_of_their_own():
    assert [instance_id(arguments("CPU", name=f"m_x_{g}_{n}")) for g in (0, 1) for n in (0, 1)] == [
        "0_0", "0_1", "1_0", "1_1"]  # fmt: skip


def test_the_cpu_has_no_gpus():
    assert gpus(arguments("CPU"), StageDeploy()) == []


def test_triton_chooses_the_gpu_of_an_instance_with_one():
    assert gpus(arguments("GPU", 3), StageDeploy(device="cuda", gpus=[1, 3])) == [3]


def test_an_instance_with_several_gpus_has_those_of_its_group():
    deploy = StageDeploy(device="cuda", gpus=[4, 5, 2, 3], gpus_per_instance=2)
    groups = ("m_x_0", "renamed")
    assert gpus(arguments("MODEL", name="m_x_0_0", groups=groups), deploy) == [4, 5]
    assert gpus(arguments("MODEL", name="renamed_7", groups=groups), deploy) == [2, 3]
    with pytest.raises(ConfigError, match="m_x: `gpus` has no GPU for instance group 1"):
        gpus(arguments("MODEL", name="renamed_7", groups=groups), StageDeploy())


@pytest.mark.parametrize(
    ("numbers", "inherited", "seen"),
    [([], None, ""), ([], "0,1", ""), ([1], None, "1"), ([0, 1], None, "0,1"), ([1], "6, 7", "7"),
     ([1, 0], "GPU-a,GPU-b", "GPU-b,GPU-a")],
)  # fmt: skip
def test_a_worker_sees_its_gpus_alone_however_the_server_was_started(numbers, inherited, seen):
    assert visible_devices(numbers, inherited) == seen


def test_a_gpu_that_the_server_does_not_see_is_named():
    with pytest.raises(ConfigError, match="`gpus` names GPU 2, but the server's CUDA_VISIBLE_DEVICES is '0,1'"):
        visible_devices([1, 2], "0,1")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is ''"):
        visible_devices([0], "")
