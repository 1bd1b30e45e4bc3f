# SPDX-License-Identifier: Apache-2.0
"""A wheel of this checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from triton_omni.backends.supervisor.home import REPO

BUILD_TIMEOUT_S = 120
FOLDERS = {"client": "triton_omni", "backends": "triton_omni.backends"}
TRAP = "raise RuntimeError('a file of the user was imported in place of a package')\n"
TRAP_NAMES = ("client", "backends", "wire", "cli", "media", "core")


def build_wheel(folder: Path) -> Path:
    """Build in `folder` from a copy of the sources, as a build leaves files beside them; returns the wheel."""
    source = folder / "source"
    for name in FOLDERS:
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPO / name, source)
    build = "import sys; from setuptools import build_meta as b; print(b.build_wheel(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)],
        cwd=source, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S,
    )  # fmt: skip
    return next(folder.glob("*.whl"))


def write_traps(folder: Path) -> None:
    """Files as a user may have them beside a script; an import of one of them fails."""
    for name in TRAP_NAMES:
        (folder / f"{name}.py").write_text(TRAP)
