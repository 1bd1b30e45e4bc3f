# SPDX-License-Identifier: Apache-2.0
"""The wheel: it holds every package and data file, and runs beside a user's files whatever they are called."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.kit.package_wheel import FOLDERS, build_wheel, write_traps
from triton_omni.backends.repository import deploy_files

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 60
SCRIPT = """
import sys
from triton_omni import Client
from triton_omni.backends import wire
print(sys.modules["triton_omni"].__file__, wire.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(build_wheel(folder)) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def run_installed(installed: Path, cwd: Path, *arguments: str) -> str:
    """Output of a Python that imports the installed package in place of the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "TRITON_OMNI_ENGINE_PYTHON": str(cwd / "python")}
    (cwd / "python").write_text(f'#!/bin/sh\nPYTHONPATH={installed} exec {sys.executable} "$@"\n')
    (cwd / "python").chmod(0o700)
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_every_package_is_listed() -> None:
    packages = {
        ".".join([name, *init.parent.relative_to(ROOT / folder).parts])
        for folder, name in FOLDERS.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed)) and set(listed) == packages


def test_the_wheel_holds_every_file(installed: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    places = [
        Path("triton_omni", *Path(name).parts[1:] if name.startswith("client/") else Path(name).parts)
        for name in tracked
        if (ROOT / name).is_file()
    ]
    assert places and [str(place) for place in places if not (installed / place).is_file()] == []


def test_files_beside_a_script_shadow_nothing(installed: Path, tmp_path: Path) -> None:
    write_traps(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    packages = run_installed(installed, tmp_path, "script.py").split()
    assert [Path(file).is_relative_to(installed) for file in packages] == [True, True]
    assert "transcribe" in run_installed(installed, tmp_path, "-m", "triton_omni.cli", "--help")


def test_an_installed_package_writes_the_model_repository(installed: Path, tmp_path: Path) -> None:
    out = tmp_path / "repository"
    run_installed(installed, tmp_path, "-m", "triton_omni.cli", "repository", "--platform", "cpu", "--out", str(out))
    assert {path.name for path in out.iterdir()} == {file.parent.name for file in deploy_files()}
    for file in (ROOT / "model_repository").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            copy = out / file.relative_to(ROOT / "model_repository")
            assert copy.read_text() == file.read_text()
