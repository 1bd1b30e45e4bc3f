# SPDX-License-Identifier: Apache-2.0
"""Model repositories that `serve --deploy` makes of deploy files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from triton_omni.backends.supervisor.errors import Problem
from triton_omni.backends.supervisor.serve import run_folder as rundir
from triton_omni.backends.supervisor.serve.command import public_models, repositories, written

DEPLOY = "pipeline: toy\nstages: {tokens: , frames: , wave: {device: cuda, gpus: [1]}}\n"


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir.tempfile, "gettempdir", lambda: str(tmp_path))
    yield (made := rundir.make())
    replace(made, owner_pid=0).remove()


def deploy_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_deploy_file_becomes_its_pipelines_repository(tmp_path, run_dir):
    [repository] = written([deploy_file(tmp_path, DEPLOY)], run_dir)
    assert public_models([repository]) == ["toy"]
    assert "gpus: [ 1 ]" in (repository / "toy_wave" / "config.pbtxt").read_text()


def test_no_deploy_file_makes_nothing(run_dir):
    assert written([], run_dir) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [(DEPLOY.replace("[1]", "[1, 1]"), "mine.yaml: gpus names a GPU twice"), (DEPLOY.replace("toy", "tay"), "'tay'")],
)
def test_a_bad_file_is_a_problem_and_leaves_nothing(tmp_path, run_dir, text, words):
    with pytest.raises(Problem, match=words):
        written([deploy_file(tmp_path, text)], run_dir)
    assert not run_dir.path.exists()


def test_a_folder_of_repositories_is_none_itself(tmp_path, run_dir):
    [repository] = written([deploy_file(tmp_path, DEPLOY)], run_dir)
    assert repositories([repository]) == [repository.resolve()]
    with pytest.raises(Problem, match="is no model repository"):
        repositories([repository.parent])
