# SPDX-License-Identifier: Apache-2.0
"""Deploy values: round trip to config.pbtxt parameters, and errors that name place, key and nearest key."""

from __future__ import annotations

import json

import pytest

from triton_omni.backends.config.schema import (
    ConfigError,
    Deploy,
    LinksDeploy,
    OrchestratorDeploy,
    PlaceDeploy,
    StageDeploy,
    convert,
    from_parameters,
    to_parameters,
)
from triton_omni.backends.deploy.load import load_deploy
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE

ENGINE = {"model": 'a "quoted" \\ name\n', "n": 3, "f": 0.5, "on": True, "none": None, "list": [1, {"x": "y"}], "": 1}


def test_stage_values_survive_the_parameters():
    deploy = StageDeploy(start_timeout_s=5.5, hang_s=0.0, engine={k: v for k, v in ENGINE.items() if k})
    flat = to_parameters(deploy)
    assert all(isinstance(value, str) for value in flat.values())
    assert from_parameters(flat, StageDeploy, "model x") == deploy


def test_orchestrator_values_survive_the_parameters():
    deploy = OrchestratorDeploy(max_live=3, max_queue=0, queue_s=0.25, max_output_bytes=7)
    assert from_parameters(to_parameters(deploy), OrchestratorDeploy, "model x") == deploy


def test_where_a_single_worker_is_placed_is_said_by_the_instance_group():
    flat = to_parameters(StageDeploy(device="cuda", gpus=[2]))
    assert not {"instances", "device", "gpus", "gpus_per_instance", "route"} & set(flat)


def test_a_pool_survives_the_parameters():
    flat = to_parameters(
        StageDeploy(device="cuda", instances=3, gpus=[4, 5, 2, 3], gpus_per_instance=2, route="affinity")
    )
    read = from_parameters(flat, StageDeploy, "model x")
    assert (read.gpu_groups, read.workers, read.route) == ([[4, 5], [2, 3]], 6, "affinity")
    pools = OrchestratorDeploy(workers={"talker": 4})
    assert from_parameters(to_parameters(pools), OrchestratorDeploy, "model x") == pools


def test_a_place_survives_the_parameters():
    deploy = StageDeploy(device="cpu", place=PlaceDeploy("external"))
    flat = to_parameters(deploy)
    assert from_parameters(flat, StageDeploy, "model x").place == deploy.place
    assert "place" not in to_parameters(StageDeploy())


@pytest.mark.parametrize(
    ("ports", "range_"), [("any", (0, 0)), (7400, (7400, 7400)), ("7400-7499", (7400, 7499)), ("65535", (65535, 65535))]
)
def test_ports_of_links(ports, range_):
    assert LinksDeploy("key", ports=ports).port_range() == range_


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"links": {}}, "missing required field `key_file` - at `..links`"),
        ({"links": {"key_file": ""}}, "key_file must not be empty"),
        ({"links": {"key_file": "k", "host": ""}}, "host must not be empty"),
        ({"links": {"key_file": "k", "hots": "x"}}, "unknown field `hots`.*did you mean 'host'"),
        ({"links": {"key_file": "k", "ports": "7499-7400"}}, "ports must be 'any'"),
        ({"links": {"key_file": "k", "ports": 0}}, "ports must be 'any'"),
        ({"links": {"key_file": "k", "ports": "1-65536"}}, "ports must be 'any'"),
        ({"links": {"key_file": "k", "ports": "a-b"}}, "ports must be 'any'"),
        ({"links": {"key_file": "k", "ports": -5}}, "ports must be 'any'"),
        ({"links": {"key_file": "k", "tls": {"cert": "c", "key": "k"}}}, "missing required field `ca`"),
        ({"stages": {"wave": {"place": {"by": "hand"}}}}, "stage wave: .*Invalid enum value 'hand'.*place.by"),
        ({"stages": {"wave": {"place": {"by": "ray", "gpu": 1}}}}, "unknown field `gpu`"),
        ({"stages": {"wave": {"place": {"by": "ray", "gpus": -1}}}}, "place.gpus"),
        ({"stages": {"wave": {"place": {"by": "ray", "wait_s": float("inf")}}}}, "wait_s"),
        (
            {"links": {"key_file": "k"}, "stages": {"wave": {"device": "cpu", "place": {"by": "ray"}}}},
            "stage wave: place by ray needs `cluster`",
        ),
        ({"cluster": {"address": "h:1"}}, "missing required field `python`"),
        ({"cluster": {"address": "", "python": "p"}}, "address must not be empty"),
        ({"stages": {"wave": {"place": {}}}}, "missing required field `by`"),
        ({"stages": {"wave": {"place": {"by": "external"}}}}, "device must be cpu or cuda where place is given"),
        (
            {"stages": {"wave": {"device": "cuda", "gpus": [0], "place": {"by": "external"}}}},
            "gpus cannot be used with place",
        ),
        ({"stages": {"wave": {"device": "cpu", "place": {"by": "external"}}}}, "stage wave: place needs `links`"),
    ],
)
def test_wrong_links_and_places_name_their_key(tmp_path, values, words):
    deploy = {"pipeline": "toy", "stages": {stage.name: {} for stage in PIPELINE.stages}}
    deploy["stages"] |= values.pop("stages", {})
    file = tmp_path / "d.yaml"
    file.write_text(json.dumps(deploy | values), encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        load_deploy(file, PIPELINE)


@pytest.mark.parametrize(
    ("parameters", "kind", "words"),
    [
        ({"max_liv": "3"}, OrchestratorDeploy, "unknown field `max_liv`.*did you mean 'max_live'"),
        ({"qqqqqqqq": "3"}, OrchestratorDeploy, "unknown field `qqqqqqqq`"),
        ({"max_live": "0"}, OrchestratorDeploy, "max_live"),
        ({"max_live": "many"}, OrchestratorDeploy, "max_live"),
        ({"queue_s": "-1"}, OrchestratorDeploy, "queue_s"),
        ({"queue_s": "nan"}, OrchestratorDeploy, "float. >= 0.0 - at .*queue_s"),
        ({"total_s": "inf"}, OrchestratorDeploy, "total_s must be a finite"),
        ({"optional_s": "inf"}, OrchestratorDeploy, "optional_s must be a finite"),
        ({"hang_s": "inf"}, StageDeploy, "hang_s must be a finite"),
        ({"start_timeout_s": "inf"}, StageDeploy, "start_timeout_s must be a finite"),
        ({"start_timeout_s": "-1"}, StageDeploy, "start_timeout_s"),
        ({"engine.model": "no quotes"}, StageDeploy, "engine.model: 'no quotes' is not JSON"),
        ({"device": "tpu"}, StageDeploy, "device must be cpu, cuda or auto"),
        ({"gpus": "0"}, StageDeploy, "Expected `array`.*gpus"),
        ({"gpus": "[0"}, StageDeploy, r"gpus: '\[0' is not JSON"),
    ],
)
def test_bad_parameters_are_named_with_their_model(parameters, kind, words):
    with pytest.raises(ConfigError, match=words) as caught:
        from_parameters(parameters, kind, "model toy_wave")
    assert str(caught.value).startswith("model toy_wave: ")


GOOD = "pipeline: toy\nstages: {tokens: {}, frames: , wave: {hang_s: 3}}\n"


def load(tmp_path, text):
    path = tmp_path / "deploy.yaml"
    path.write_text(text, encoding="utf-8")
    return load_deploy(path, PIPELINE)


def test_a_deploy_file(tmp_path):
    deploy = load(tmp_path, GOOD + "orchestrator: {max_live: 5}\n")
    assert deploy.stages["frames"] == StageDeploy()
    assert deploy.stages["wave"].hang_s == 3
    assert deploy.orchestrator.max_live == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "deploy.yaml: must be a mapping"),
        ("- a", "deploy.yaml: must be a mapping"),
        ("a: [", "deploy.yaml: while parsing"),
        ("stages: {}", "missing required field `pipeline`"),
        ("pipeline: toy\nstages: [tokens]", "stages"),
        ("pipeline: toy\nstages: tokens", "stages"),
        ("pipeline: toy\nstages: {}", "stages of pipeline toy are missing: tokens, frames, wave"),
        (
            "pipeline: toy\nstages: {tokens: , frames: , wave: , nose: }",
            "unknown stages: nose; pipeline toy has tokens",
        ),
        ("pipeline: toy\nstages: {tokens: , frames: }", "are missing: wave"),
        ("pipeline: chat\nstages: {}", "pipeline is 'chat' but must be 'toy'"),
        (GOOD + "orchestrater: {}", "unknown field `orchestrater`.*did you mean 'orchestrator'"),
        (GOOD + "orchestrator: {max_lives: 1}", "did you mean 'max_live'"),
        (GOOD + "orchestrator: {stall_s: -5}", "stall_s"),
        (GOOD + "orchestrator: {stall_s: .nan}", "stall_s"),
        (GOOD + "orchestrator: {max_live: 1.5}", "max_live"),
        (GOOD + "orchestrator: {max_live: true}", "max_live"),
        (GOOD + "orchestrator: {max_live: '3'}", "max_live"),
        (GOOD + "orchestrator: ", "orchestrator"),
        ("pipeline: toy\nstages: {tokens: {instance: 2}, frames: , wave: }", "did you mean 'instances'"),
        ("pipeline: toy\nstages: {tokens: {hang_s: .inf}, frames: , wave: }", "hang_s must be a finite"),
        ("pipeline: toy\nstages: {tokens: {device: gpu}, frames: , wave: }", "device must be"),
        ("pipeline: toy\nstages: {tokens: 5, frames: , wave: }", "stage tokens: Expected `object`"),
        ("pipeline: toy", "missing required field `stages`"),
        ("pipeline: toy\nstages: {tokens: {gpu: [0]}, frames: , wave: }", "did you mean 'gpus'"),
        ("pipeline: toy\nstages: {tokens: {gpus: [-1]}, frames: , wave: }", r"int. >= 0 - at .*gpus"),
        ("pipeline: toy\nstages: {tokens: {gpus: 1}, frames: , wave: }", "Expected `array`.*gpus"),
        ("pipeline: toy\nstages: {tokens: {gpus: [1, 1]}, frames: , wave: }", "gpus names a GPU twice"),
        ("pipeline: toy\nstages: {tokens: {gpus: [1], device: cpu}, frames: , wave: }", "gpus cannot be used"),
        ("pipeline: toy\nstages: {tokens: {gpus_per_instance: 2}, frames: , wave: }", "gpus must name a multiple"),
        ("pipeline: toy\nstages: {tokens: {gpus: [0, 1, 2], gpus_per_instance: 2}, frames: , wave: }", "a multiple"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith("deploy.yaml: ")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_deploy(tmp_path / "nowhere.yaml", PIPELINE)


def test_convert_is_strict_about_types():
    assert convert({"pipeline": "x", "stages": {}}, Deploy, "here").pipeline == "x"
    with pytest.raises(ConfigError, match=r"^here: "):
        convert({"pipeline": 5, "stages": {}}, Deploy, "here")
