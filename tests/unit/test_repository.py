# SPDX-License-Identifier: Apache-2.0
"""What is written into model_repository/, and that nothing in it can break its quotes."""

from __future__ import annotations

import ast
import re

import pytest

from triton_omni import cli
from triton_omni.backends import repository
from triton_omni.backends.config.schema import ClusterDeploy, Deploy, LinksDeploy, PlaceDeploy, StageDeploy
from triton_omni.backends.deploy.load import load_deploy
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE


def files(**stages):
    given = {s.name: StageDeploy() for s in PIPELINE.stages} | stages
    return repository.repository_files(PIPELINE, Deploy("toy", given))


def test_every_model_has_its_two_files():
    assert sorted(files()) == [
        f"{model}/{name}"
        for model in ("toy", "toy_frames", "toy_tokens", "toy_wave")
        for name in ("1/model.py", "config.pbtxt")
    ]


def test_model_files_hold_no_logic():
    for name, text in files().items():
        if name.endswith(".py"):
            tree = ast.parse(text)
            assert [type(node) for node in tree.body] == [ast.Expr, ast.ImportFrom]
            assert ast.get_docstring(tree)
            assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")


@pytest.mark.parametrize(("device", "kind"), [("cpu", "KIND_CPU"), ("cuda", "KIND_GPU"), ("auto", "KIND_AUTO")])
def test_a_stage_is_one_instance_with_all_its_workers(device, kind):
    written = files(wave=StageDeploy(instances=3, device=device))
    assert f"instance_group [{{ kind: {kind} count: 1 }}]" in written["toy_wave/config.pbtxt"]
    assert 'key: "instances" value: { string_value: "3" }' in written["toy_wave/config.pbtxt"]
    assert 'key: "workers" value: { string_value: "{\\"wave\\": 3}" }' in written["toy/config.pbtxt"]


@pytest.mark.parametrize(
    ("deploy", "group", "workers"),
    [
        (StageDeploy(device="cuda", gpus=[1]), "{ kind: KIND_GPU gpus: [ 1 ] count: 1 }", 1),
        (StageDeploy(device="auto", gpus=[3, 0], instances=2), "{ kind: KIND_MODEL count: 1 }", 4),
        (StageDeploy(device="cuda", gpus=[0, 1, 2, 3], gpus_per_instance=2), "{ kind: KIND_MODEL count: 1 }", 2),
    ],
)
def test_the_stub_places_workers_on_several_gpus(deploy, group, workers):
    text = files(wave=deploy)["toy_wave/config.pbtxt"]
    assert f"instance_group [{group}]\n" in text
    assert ('key: "gpus"' in text) == ("KIND_MODEL" in group)
    assert deploy.workers == workers


def test_hostile_option_values_stay_inside_their_quotes():
    text = files(wave=StageDeploy(engine={"model": 'x" } } name: "evil" \\ \n'}))["toy_wave/config.pbtxt"]
    [line] = [line for line in text.splitlines() if "engine.model" in line]
    assert re.fullmatch(r'parameters \{ key: "[^"]*" value: \{ string_value: "(?:[^"\\]|\\.)*" \} \}', line)


def test_stage_models_take_the_open_and_the_short_form():
    text = files()["toy_wave/config.pbtxt"]
    inputs = re.findall(r'^input \{ name: "(\w+)".* optional: true \}$', text, re.MULTILINE)
    outputs = re.findall(r'^output \{ name: "(\w+)"', text, re.MULTILINE)
    assert inputs == ["open", "request", "text_input", "stream", "frames"]
    assert outputs == ["event", "text_output", "audio"]


def test_writing_and_writing_again(tmp_path, capsys):
    def run(*arguments):
        command = ["repository", "--out", str(tmp_path), "--platform", "cpu", *arguments]
        return cli.main(command), capsys.readouterr().out

    assert run("--pipeline", "toy") == (0, f"{tmp_path}: 8 file(s) written\n")
    assert run("--pipeline", "toy") == (0, f"{tmp_path}: 0 file(s) written\n")
    (tmp_path / "toy" / "toy" / "config.pbtxt").write_text("edited", encoding="utf-8")
    assert run("--pipeline", "toy") == (0, f"{tmp_path}: 1 file(s) written\n")
    deploy = tmp_path / "other.yaml"
    deploy.write_text("pipeline: toy\nstages: {tokens: {instances: 2}, frames: , wave: }\n", encoding="utf-8")
    run("--deploy", str(deploy))
    assert 'key: "instances" value: { string_value: "2" }' in (
        tmp_path / "toy" / "toy_tokens" / "config.pbtxt"
    ).read_text(encoding="utf-8")
    assert load_deploy(deploy, PIPELINE).stages["tokens"].instances == 2
    code, text = run("--pipeline", "tay")
    assert code == 1 and "no pipeline is called tay" in text


def test_links_and_cluster_reach_every_model_and_a_placed_stage_needs_no_gpu_here():
    stages = {s.name: StageDeploy() for s in PIPELINE.stages}
    stages["wave"] = StageDeploy(device="cuda", place=PlaceDeploy("ray", gpus=1))
    deploy = Deploy("toy", stages, links=LinksDeploy("/key"), cluster=ClusterDeploy("h:1", "/py"))
    made = {
        name: text for name, text in repository.repository_files(PIPELINE, deploy).items() if name.endswith("pbtxt")
    }
    assert len(made) == 4
    for text in made.values():
        assert 'key: "links"' in text and 'key: "cluster"' in text
    assert "instance_group [{ kind: KIND_CPU count: 1 }]" in made["toy_wave/config.pbtxt"]
    assert 'key: "device" value: { string_value: "cuda" }' in made["toy_wave/config.pbtxt"]
