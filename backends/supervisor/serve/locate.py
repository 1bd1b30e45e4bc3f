# SPDX-License-Identifier: Apache-2.0
"""Finds tritonserver and the environment of its Python stubs: in NVIDIA's container, or where set-up unpacked it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from triton_omni.backends.config import paths
from triton_omni.backends.config.paths import (
    ENGINE_PYTHON_VARIABLE,
    HOME_VARIABLE,
    MODELS_VARIABLE,
    SERVER_VARIABLE,
    absolute,
)
from triton_omni.backends.supervisor.errors import SetupError
from triton_omni.backends.supervisor.home import Home

CONTAINER = Path("/opt/tritonserver")

_FACTS = """
import json, os, sys, sysconfig
v = sysconfig.get_config_var
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "folders": [v("LIBDIR") or "", os.path.join(v("LIBDIR") or "", v("MULTIARCH") or ""), v("LIBPL") or "",
                os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_prefix, "lib64"),
                os.path.join(os.path.dirname(os.path.realpath(sys.executable)), "..", "lib")],
}))
"""
_SYSTEM_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/lib/x86_64-linux-gnu")


@dataclass(frozen=True)
class Server:
    """A tritonserver that can be started.

    environment  variables it needs beyond the caller's; PATH and LD_LIBRARY_PATH are complete values
    stub_python  the interpreter of its Python stubs
    in_container True where that is the container's own Python
    options      the options that its help lists, each with its dashes: they differ from version to version
    """

    binary: Path
    backends: Path
    environment: Mapping[str, str]
    stub_python: Path
    in_container: bool
    options: frozenset[str] = frozenset()


def find_server(home: Home, environ: Mapping[str, str] | None = None, container: Path = CONTAINER) -> Server:
    """The server that TRITON_OMNI_SERVER names, else the container's, else the one in `home`.

    Raises SetupError if there is none.
    """
    environ = os.environ if environ is None else environ
    named = environ.get(SERVER_VARIABLE)
    ours = {
        HOME_VARIABLE: str(home.root),
        ENGINE_PYTHON_VARIABLE: str(absolute(environ.get(ENGINE_PYTHON_VARIABLE) or home.engine_python)),
        MODELS_VARIABLE: str(absolute(environ.get(MODELS_VARIABLE) or home.models)),
    }
    if not named and (container / "bin" / "tritonserver").is_file():
        python = Path(shutil.which("python3", path=environ.get("PATH", os.defpath)) or sys.executable)
        binary = container / "bin" / "tritonserver"
        return Server(binary, container / "backends", ours, python, True, options_of(binary, environ))
    tree = absolute(named) if named else home.tritonserver_tree
    binary = tree / "bin" / "tritonserver"
    for path in (binary, home.stub_python):
        if not path.is_file():
            hint = f"correct {SERVER_VARIABLE}" if named and path == binary else "make setup"
            raise SetupError(f"no tritonserver: {path} does not exist", hint=hint)
    ours |= {
        "PATH": f"{home.stub / 'bin'}:{environ.get('PATH', os.defpath)}",  # the stub runs the first python3 on PATH
        "VIRTUAL_ENV": str(home.stub),
        "LD_LIBRARY_PATH": library_path(home, environ),
    }
    return Server(binary, tree / "backends", ours, home.stub_python, False, options_of(binary, {**environ, **ours}))


def options_of(binary: Path, environ: Mapping[str, str]) -> frozenset[str]:
    """The options that a tritonserver's help lists; none if it cannot be run, which its start reports."""
    try:
        shown = subprocess.run(
            [str(binary), "--help"], env=dict(environ), capture_output=True, text=True, check=False,
            timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return frozenset()
    return frozenset(re.findall(r"^ +(--[a-z0-9-]+)", shown.stdout + shown.stderr, re.MULTILINE))


def library_path(home: Home, environ: Mapping[str, str]) -> str:
    """LD_LIBRARY_PATH of a local server: the stub's libpython, and NVIDIA's driver if it is found there only."""
    driver = paths.driver_library_path(environ.get("LD_LIBRARY_PATH", ""))
    return f"{link_libpython(home)}:{driver}" if driver else str(link_libpython(home))


def link_libpython(home: Home) -> Path:
    """A folder that holds only a fresh link to the stub environment's libpython.

    Replaced at each start, because a link to another Python's library causes obscure import errors in the stub. Alone
    in its folder, so that the server finds no other library of that Python.
    """
    library = libpython_of(home.stub_python)
    home.libpython.mkdir(parents=True, exist_ok=True)
    draft = home.libpython / f".new-{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(library)
    draft.replace(home.libpython / library.name)
    for other in home.libpython.glob("libpython*"):
        if other.name != library.name:
            other.unlink(missing_ok=True)
    return home.libpython


def libpython_of(python: Path) -> Path:
    """The shared libpython of an interpreter. Raises SetupError if it has none."""
    answer = subprocess.run(
        [str(python), "-I", "-c", _FACTS],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    facts = json.loads(answer.stdout)
    library = find_libpython(facts["version"], [*facts["folders"], *_SYSTEM_FOLDERS])
    if library is None:
        raise SetupError(
            f"{python} (Python {facts['version']}) has no shared libpython, which Triton's Python stub links with",
            hint=f"use Debian's python3 with the package libpython{facts['version']}, a conda or uv Python, "
            "or rebuild with --enable-shared; then make setup PYTHON=<that python>",
        )
    return library


def find_libpython(version: str, folders: Iterable[str]) -> Path | None:
    """The first libpython of `version` in `folders`, by its real path."""
    for folder in folders:
        library = Path(folder) / f"libpython{version}.so.1.0"
        if folder and library.is_file():
            return library.resolve()
    return None
