# SPDX-License-Identifier: Apache-2.0
"""What is committed under model_repository/ is exactly what `make repository` would write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.expect import accepts
from triton_omni.backends.deploy.load import load_deploy
from triton_omni.backends.pipelines import load
from triton_omni.backends.repository import deploy_files, repository_files

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [file.parent for file in deploy_files()]
VARIANTS = sorted((ROOT / "backends" / "pipelines").glob("*/deploy-*.yaml"))


@pytest.mark.parametrize("folder", FOLDERS, ids=[f.name for f in FOLDERS])
def test_the_committed_repository_is_fresh(folder):
    pipeline = load(folder.name)
    expected = repository_files(pipeline, load_deploy(folder / "deploy.yaml", pipeline))
    committed = ROOT / "model_repository" / pipeline.name
    found = {
        str(path.relative_to(committed)): path.read_text(encoding="utf-8")
        for path in committed.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sorted(found) == sorted(expected), "run `make repository`; files of removed stages must go"
    assert found == expected


@pytest.mark.parametrize("file", VARIANTS, ids=[f.name for f in VARIANTS])
def test_other_deploy_files_of_a_pipeline_fit_it(file):
    accepts(load_deploy, file, load(file.parent.name))


def test_no_repository_is_left_of_a_pipeline_that_is_gone():
    assert {p.name for p in (ROOT / "model_repository").iterdir()} <= {f.name for f in FOLDERS}
