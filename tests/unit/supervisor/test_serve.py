# SPDX-License-Identifier: Apache-2.0
"""Model repositories that `serve --deploy` writes from deploy files."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from triton_omni.backends.config.paths import operator_key
from triton_omni.backends.supervisor.deployment import write_deployed
from triton_omni.backends.supervisor.errors import SetupError
from triton_omni.backends.supervisor.serve.command import checked_repositories, deploys_of, make_key, public_models
from triton_omni.backends.supervisor.serve.options import add_serve_options

DEPLOY = "pipeline: toy\nstages: {tokens: , frames: , wave: {device: cuda, gpus: [1]}}\n"


def deploy_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_deploy_file_becomes_the_repository_of_its_pipeline(tmp_path):
    [repository] = write_deployed(tmp_path / "out", [deploy_file(tmp_path, DEPLOY)], "cpu")
    assert public_models([repository]) == ["toy"]
    assert "gpus: [ 1 ]" in (repository / "toy_wave" / "config.pbtxt").read_text()


def test_the_platform_block_counts(tmp_path):
    file = deploy_file(tmp_path, DEPLOY + "cpu: {stages: {wave: {device: cpu, gpus: null}}}\n")
    kinds = {"cpu": "KIND_CPU", "cuda": "KIND_GPU"}
    for platform, kind in kinds.items():
        [repository] = write_deployed(tmp_path / platform, [file], platform)
        assert kind in (repository / "toy_wave" / "config.pbtxt").read_text()


def test_no_deploy_file_writes_nothing(tmp_path):
    assert write_deployed(tmp_path / "out", [], "cpu") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEPLOY.replace("[1]", "[1, 1]"), "mine.yaml: stage wave: gpus names a GPU twice"),
        (DEPLOY.replace("toy", "tay"), "'tay'"),
    ],
)
def test_an_unusable_deploy_file_is_a_setup_error(tmp_path, text, message):
    with pytest.raises(SetupError, match=message):
        write_deployed(tmp_path / "out", [deploy_file(tmp_path, text)], "cpu")


def test_two_deploy_files_of_a_pipeline_are_refused(tmp_path):
    file = deploy_file(tmp_path, DEPLOY)
    with pytest.raises(SetupError, match="another deploy file is for the same pipeline"):
        write_deployed(tmp_path / "out", [file, file], "cpu")


def test_the_embedded_default_is_served_only_if_nothing_is_named():
    def named(*arguments):
        parser = argparse.ArgumentParser()
        add_serve_options(parser)
        return [file.parent.name for file in deploys_of(parser.parse_args(arguments))]

    assert named() == ["chat", "image"]
    assert named("--repository", "model_repository/toy") == []
    assert named("--deploy", "toy/deploy.yaml") == ["toy"]


def test_the_operators_key_is_made_once_and_private(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir(mode=0o700)
    file = tmp_path / "operator"
    key = make_key(file, tmp_path / "one")
    assert len(key) == 32 and file.stat().st_mode & 0o077 == 0
    assert make_key(file, tmp_path / "two") == key == operator_key(tmp_path / "two")
    assert make_key(None, tmp_path / "one") == key, "a run folder keeps its key"


@pytest.mark.parametrize("text", ["short", "with space in it, far too long to guess", "a:b=c" * 8])
def test_a_key_that_triton_could_misread_is_refused(tmp_path, text):
    (tmp_path / "operator").write_text(text)
    with pytest.raises(SetupError, match="16 to 128 letters and digits"):
        make_key(tmp_path / "operator", tmp_path)


def test_a_folder_of_repositories_is_no_repository(tmp_path):
    [repository] = write_deployed(tmp_path / "out", [deploy_file(tmp_path, DEPLOY)], "cpu")
    assert checked_repositories([repository]) == [repository.resolve()]
    with pytest.raises(SetupError, match="is not a model repository"):
        checked_repositories([repository.parent])
