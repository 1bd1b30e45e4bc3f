# SPDX-License-Identifier: Apache-2.0
"""docs/adding-a-pipeline.md is true: its files, as they stand there, are a pipeline that keeps the contract."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import triton_omni.backends.pipelines
from tests.kit.engine_contract import CHECKS, Subject, check_name
from triton_omni.backends.core.generate import GenerateRequest, Message
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.deploy.load import load_deploy
from triton_omni.backends.repository import repository_files

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "adding-a-pipeline.md"
FILE = re.compile(r"`shout/([\w.]+)`\n.*?```\w+\n(.*?)```", re.DOTALL)


@pytest.fixture
def shout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The pipeline of the document, loaded from its files."""
    folder = tmp_path / "shout"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name, content in FILE.findall(DOCUMENT.read_text(encoding="utf-8")):
        (folder / name).write_text(content, encoding="utf-8")
    monkeypatch.setattr(
        triton_omni.backends.pipelines, "__path__", [*triton_omni.backends.pipelines.__path__, str(tmp_path)]
    )
    yield triton_omni.backends.pipelines.load("shout")
    for module in [name for name in sys.modules if name.startswith("triton_omni.backends.pipelines.shout")]:
        del sys.modules[module]


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_its_engines_keep_the_contract(shout, check):
    def make(stage: str):
        return lambda: shout.stage(stage).engine(EngineContext("shout", stage, {}))

    check(
        Subject(
            make("words"),
            GenerateRequest(messages=(Message("user", "good morning to you"),)),
            refused=GenerateRequest(messages=(Message("user", " "),)),
            wanted=frozenset({"text"}),
        )
    )
    fed = GenerateRequest(messages=(Message("user", "a b"),))
    check(
        Subject(make("beeps"), fed, upstream="words", inputs=("A", "B", ""), wanted=frozenset({"audio"}), feeds=False)
    )


def test_its_deploy_file_makes_its_repository(shout, tmp_path):
    files = repository_files(shout, load_deploy(tmp_path / "shout" / "deploy.yaml", shout))
    assert {path.split("/")[0] for path in files} == {"shout", "shout_words", "shout_beeps"}
