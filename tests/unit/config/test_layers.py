# SPDX-License-Identifier: Apache-2.0
"""Deploy files in layers: what counts, where it comes from, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from triton_omni.backends.config.schema import ConfigError, StageDeploy
from triton_omni.backends.deploy.gpu_memory import gpu_memory_errors
from triton_omni.backends.deploy.layers import leaves, read_layers
from triton_omni.backends.deploy.load import load_deploy, read_deploy
from triton_omni.backends.pipelines import load
from triton_omni.backends.supervisor.deployment import show_deploy

BASE = """\
pipeline: toy
orchestrator: {max_live: 4}
stages:
  tokens:
    engine: {a: 1, deep: {x: 1, y: 2}}
  frames:
  wave:
    device: cpu
cuda:
  stages:
    wave: {device: cuda, gpus: [0]}
"""
TOP = """\
extends: base.yaml
orchestrator:
  max_live: null
  max_queue: 7
stages:
  tokens:
    engine: {deep: {y: 3}, b: [1]}
cuda:
  stages:
    wave: {gpus: [1]}
"""


@pytest.fixture
def top(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "top.yaml").write_text(TOP)
    return tmp_path / "top.yaml"


def test_layers_are_merged_key_by_key(top: Path) -> None:
    deploy = read_deploy(top, "cpu")
    assert deploy.stages["tokens"].engine == {"a": 1, "deep": {"x": 1, "y": 3}, "b": [1]}
    assert deploy.orchestrator.max_live == 64, "null brings the default back"
    assert deploy.orchestrator.max_queue == 7
    assert deploy.stages["frames"] == StageDeploy()


def test_a_block_counts_on_its_platform_only(top: Path) -> None:
    assert read_deploy(top, "cpu").stages["wave"] == StageDeploy(device="cpu")
    assert read_deploy(top, "cuda").stages["wave"] == StageDeploy(device="cuda", gpus=[1])


def test_every_value_keeps_its_place(top: Path) -> None:
    tree, files = read_layers(top, "cuda")
    assert [file.name for file in files] == ["base.yaml", "top.yaml"]
    origins = {keys: leaf.origin for keys, leaf in leaves(tree)}
    assert origins["stages.tokens.engine.deep.x"] == "base.yaml:5"
    assert origins["stages.tokens.engine.deep.y"] == "top.yaml:7"
    assert origins["stages.wave.gpus"] == "top.yaml:10"
    assert origins["stages.wave.device"] == "base.yaml:11"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: top.yaml\n", "top.yaml: extends itself"),
        ("extends: none.yaml\n", "none.yaml: .*No such file"),
        ("extends: 3\n", "extends must be the name of a deploy file"),
        ("extends: base.yaml\npipeline: chat\n", "pipeline must be 'toy'"),
        ("extends: base.yaml\ncuda: {pipeline: toy}\n", "block `cuda` may only have the keys orchestrator, stages"),
        ("extends: base.yaml\nstages: {tokens: {}, tokens: {}}\n", "top.yaml:2: key 'tokens' is used twice"),
        ("- list\n", "must be a mapping"),
    ],
)
def test_unusable_layers_name_the_file(top: Path, text: str, message: str) -> None:
    top.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_deploy(top)


def test_all_errors_are_reported_at_once(top: Path) -> None:
    top.write_text(
        "extends: base.yaml\norchestrator: {max_lives: 3}\nstages: {tokens: {instances: 0}, wave: {device: tpu}}\n"
    )
    with pytest.raises(ConfigError) as error:
        read_deploy(top)
    text = str(error.value)
    assert "max_lives" in text and "max_live'" in text and "stage tokens" in text and "stage wave" in text
    top.write_text("pipeline: toy\nstages: {tokens: {}, waves: {}}\n")
    with pytest.raises(ConfigError) as error:
        load_deploy(top, load("toy"))
    assert "missing: frames, wave" in str(error.value) and "unknown stages: waves" in str(error.value)


def stage(gpus: list[int], gb: float, instances: int = 1) -> StageDeploy:
    return StageDeploy(device="cuda", gpus=gpus, instances=instances, gpu_memory_bytes=int(gb * 1e9))


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ({"a": stage([0], 60), "b": stage([0], 20)}, []),
        (
            {"a": stage([0], 60), "b": stage([0, 1], 21)},
            ["GPU 0 has 80.0 GB but 81.0 GB are needed: a 60.0 GB, b 21.0 GB"],
        ),
        ({"a": stage([0], 41, instances=2)}, ["GPU 0 has 80.0 GB but 82.0 GB"]),
        ({"a": stage([0], 90), "b": stage([1], 90)}, ["GPU 0", "GPU 1"]),
        ({"a": stage([0], 0), "b": stage([0], 9)}, ["GPU 0 is shared: gpu_memory_bytes must be set for a"]),
        ({"a": stage([0], 0)}, []),
    ],
)
def test_stages_that_share_a_gpu_must_fit(stages: dict[str, StageDeploy], words: list[str]) -> None:
    errors = gpu_memory_errors(stages, 80 * 10**9)
    assert len(errors) == len(words) and all(word in error for word, error in zip(words, errors, strict=True))
    assert gpu_memory_errors(stages, 0) == []


def test_doctor_shows_the_merged_file_and_its_errors(top: Path) -> None:
    lines: list[str] = []
    options = argparse.Namespace(deploy=top, platform="cuda")
    assert show_deploy(options, lines.append) == 0
    shown = "\n".join(lines)
    assert "base.yaml < " in lines[0] and "stages.wave.gpus: [1]" in shown and "top.yaml:10" in shown
    top.write_text(TOP + "gpu_bytes: 1000\n" + "stages.x: 1\n")
    assert show_deploy(options, lines.append) == 1
    assert lines[-1].startswith("error: top.yaml") and "stages.x" in lines[-1]
