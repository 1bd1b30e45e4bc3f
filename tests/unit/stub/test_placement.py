# SPDX-License-Identifier: Apache-2.0
"""Workers and GPUs: what Triton tells a stub, and what each worker is shown of it."""

from __future__ import annotations

import pytest

from triton_omni.backends.config.schema import ConfigError, StageDeploy
from triton_omni.backends.stub.placement import instance_id, visible_devices, workers


def arguments(kind, device=0, name="m_x_0_0"):
    return {
        "model_name": "m_x", "model_instance_name": name, "model_instance_kind": kind,
        "model_instance_device_id": str(device),
    }  # fmt: skip


def test_one_group_on_two_gpus_has_two_ids():
    """Triton calls both m_x_0_0."""
    assert {instance_id(arguments("GPU", device)) for device in (0, 1)} == {"0_0_gpu0", "0_0_gpu1"}


def test_groups_and_their_members_have_ids_of_their_own():
    assert [instance_id(arguments("CPU", name=f"m_x_{g}_{n}")) for g in (0, 1) for n in (0, 1)] == [
        "0_0", "0_1", "1_0", "1_1"]  # fmt: skip


def test_workers_of_a_cpu_have_no_gpus():
    assert workers(arguments("CPU"), StageDeploy()) == {"0_0": []}
    assert workers(arguments("CPU"), StageDeploy(instances=2)) == {"0_0.0": [], "0_0.1": []}


def test_triton_chooses_the_gpu_of_a_stub_with_one():
    assert workers(arguments("GPU", 3), StageDeploy(instances=2)) == {"0_0_gpu3.0": [3], "0_0_gpu3.1": [3]}


def test_one_stub_has_the_workers_of_all_gpus_of_the_deploy_file():
    one_each = StageDeploy(device="cuda", gpus=[3, 0], instances=2)
    assert list(workers(arguments("MODEL"), one_each).values()) == [[3], [3], [0], [0]]
    two_each = StageDeploy(device="cuda", gpus=[4, 5, 2, 3], gpus_per_instance=2)
    assert workers(arguments("MODEL"), two_each) == {"0_0.0": [4, 5], "0_0.1": [2, 3]}
    assert (one_each.workers, two_each.workers) == (4, 2)
    with pytest.raises(ConfigError, match="m_x: an instance of KIND_MODEL needs `gpus`"):
        workers(arguments("MODEL"), StageDeploy())


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
