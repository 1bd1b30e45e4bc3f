# SPDX-License-Identifier: Apache-2.0
"""Finding a server, its libpython and its environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from triton_omni.backends.supervisor.errors import SetupError
from triton_omni.backends.supervisor.home import Home
from triton_omni.backends.supervisor.serve.locate import find_libpython, find_server, link_libpython


def local_home(root: Path) -> Home:
    """A home that looks set up; its stub interpreter is the running Python."""
    home = Home(root / "home")
    (home.tritonserver_tree / "bin").mkdir(parents=True)
    (home.tritonserver_tree / "bin" / "tritonserver").touch()
    home.stub_python.parent.mkdir(parents=True)
    home.stub_python.symlink_to(sys.executable)
    return home


def test_libpython_is_the_first_one_of_the_version(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "libpython3.12.so.1.0").touch()
    (tmp_path / "b" / "libpython3.11.so.1.0").touch()
    folders = ["", str(tmp_path / "none"), str(tmp_path / "a"), str(tmp_path / "b")]
    assert find_libpython("3.11", folders) == tmp_path / "b" / "libpython3.11.so.1.0"
    assert find_libpython("3.13", folders) is None


def test_the_link_is_replaced_and_alone(tmp_path: Path) -> None:
    home = local_home(tmp_path)
    home.libpython.mkdir()
    stale = home.libpython / "libpython3.99.so.1.0"
    stale.symlink_to("/nowhere")
    folder = link_libpython(home)
    (link,) = folder.iterdir()
    assert link.is_symlink() and link.resolve().is_file() and f"{sys.version_info[1]}" in link.name


def test_local_server_environment(tmp_path: Path) -> None:
    home = local_home(tmp_path)
    server = find_server(home, {"PATH": "/usr/bin"}, container=tmp_path / "none")
    environment = server.environment
    assert not server.in_container
    assert environment["PATH"] == f"{home.stub}/bin:/usr/bin"
    assert environment["LD_LIBRARY_PATH"] == str(home.libpython)
    assert environment["TRITON_OMNI_ENGINE_PYTHON"] == str(home.engine_python)


def test_the_drivers_folder_on_the_library_path_reaches_the_server(tmp_path: Path) -> None:
    home = local_home(tmp_path)
    (tmp_path / "libcuda.so.1").touch()
    environ = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    server = find_server(home, environ, container=tmp_path / "none")
    assert server.environment["LD_LIBRARY_PATH"] == f"{home.libpython}:{tmp_path}"


def test_container_layout_wins_and_needs_no_overlay(tmp_path: Path) -> None:
    home, container = local_home(tmp_path), tmp_path / "opt"
    (container / "bin").mkdir(parents=True)
    (container / "bin" / "tritonserver").touch()
    server = find_server(home, {"PATH": "/usr/bin:/bin", "TRITON_OMNI_ENGINE_PYTHON": "/e/python"}, container)
    assert server.in_container and server.binary == container / "bin" / "tritonserver"
    assert server.backends == container / "backends"
    assert set(server.environment) == {"TRITON_OMNI_HOME", "TRITON_OMNI_ENGINE_PYTHON", "TRITON_OMNI_MODELS"}
    assert server.environment["TRITON_OMNI_ENGINE_PYTHON"] == "/e/python"


def test_another_server_can_be_named(tmp_path: Path) -> None:
    home, other, container = local_home(tmp_path), tmp_path / "other", tmp_path / "opt"
    for tree in (other, container):
        (tree / "bin").mkdir(parents=True)
        (tree / "bin" / "tritonserver").write_text(
            "#!/bin/sh\nprintf '  --new-option <boolean>\\n\\ttext --not\\n' >&2\n"
        )
        (tree / "bin" / "tritonserver").chmod(0o755)
    server = find_server(home, {"TRITON_OMNI_SERVER": str(other), "PATH": "/usr/bin:/bin"}, container)
    assert server.binary == other / "bin" / "tritonserver" and server.backends == other / "backends"
    assert not server.in_container and server.options == {"--new-option"}
    with pytest.raises(SetupError, match="correct TRITON_OMNI_SERVER"):
        find_server(home, {"TRITON_OMNI_SERVER": str(tmp_path)}, container)


def test_no_server_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="make setup"):
        find_server(Home(tmp_path), {}, container=tmp_path / "none")
