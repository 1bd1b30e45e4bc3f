# SPDX-License-Identifier: Apache-2.0
"""What can be checked of docker/ without a container engine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from triton_omni import cli
from triton_omni.backends.supervisor.home import REPO
from triton_omni.backends.supervisor.serve.options import add_serve_options

DOCKER = REPO / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
OLDEST_TAG = (26, 7)


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, continued lines joined, comments dropped."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def build_arguments(file: Path) -> set[str]:
    return {rest.partition("=")[0] for word, rest in instructions(file) if word == "ARG"}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: f.name)
def test_every_copied_source_exists(file: Path) -> None:
    copied = [source for word, rest in instructions(file) if word == "COPY" for source in rest.split()[:-1]]
    assert copied
    assert [source for source in copied if not (REPO / source).exists()] == []


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: f.name)
def test_every_argument_is_used(file: Path) -> None:
    text = file.read_text()
    assert [name for name in build_arguments(file) if f"${{{name}}}" not in text] == []


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda f: f.name)
def test_images_do_not_run_as_root_and_say_how_they_are(file: Path) -> None:
    found = dict(instructions(file))
    assert found["USER"] == "1000"
    assert "HEALTHCHECK" in found
    assert importlib.util.find_spec(module_of(found["ENTRYPOINT"])) is not None


def module_of(entry_point: str) -> str:
    words = json.loads(entry_point)
    return words[words.index("-m") + 1]


def test_the_servers_entry_point_is_a_command_line_of_ours() -> None:
    found = dict(instructions(DOCKER / "server.Dockerfile"))
    words = json.loads(found["ENTRYPOINT"]) + json.loads(found["CMD"])
    options = cli.parser().parse_args(words[words.index("serve") :])
    assert options.host == "0.0.0.0" and options.no_proxy
    assert (REPO / options.deploy[0].relative_to("/opt/triton-omni/source")).is_file()


def test_nvidias_image_is_new_enough() -> None:
    arguments = dict(rest.split("=", 1) for word, rest in instructions(DOCKER / "server.Dockerfile") if word == "ARG")
    year, month = map(int, arguments["TRITON_TAG"].split("."))
    assert (year, month) >= OLDEST_TAG
    assert dict(instructions(DOCKER / "server.Dockerfile"))["FROM"].endswith(":${TRITON_TAG}-py3")


def test_compose_builds_what_is_here() -> None:
    for service in compose()["services"].values():
        build = service["build"]
        file = (DOCKER / build["context"] / build["dockerfile"]).resolve()
        assert file in [f.resolve() for f in DOCKERFILES]
        assert set(build.get("args", {})) <= build_arguments(file)


def test_compose_gives_the_server_what_triton_needs() -> None:
    server, proxy = compose()["services"]["server"], compose()["services"]["proxy"]
    assert server["shm_size"] == "4gb" and server["ulimits"]["memlock"] == -1
    assert proxy["depends_on"]["server"]["condition"] == "service_healthy"
    for service in (server, proxy):
        assert service["restart"] == "on-failure"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])  # publishing wider is a decision
    grace_s = int(server["stop_grace_period"].removesuffix("s"))
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    assert grace_s > parser.parse_args([]).exit_timeout_s
