# SPDX-License-Identifier: Apache-2.0
"""The commands of `triton-omni` that run on the server's machine. Standard library only at import."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triton_omni.backends.config.paths import LOOPBACK_HOSTS
from triton_omni.backends.supervisor.errors import SetupError, report
from triton_omni.backends.supervisor.interpreter import use_engine_python
from triton_omni.backends.supervisor.serve import run_folder
from triton_omni.backends.supervisor.serve.options import add_serve_options

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

COMMANDS = ("serve", "demo", "doctor", "repository")


def add_commands(commands: Commands) -> None:
    """Add the parsers of COMMANDS."""
    add_serve_options(_command(commands, "serve", "run server and OpenAI proxy until Ctrl-C"))
    _command(commands, "demo", "start a server, ask it for speech and an image; files in out/")
    doctor = _command(commands, "doctor", "check set-up and running servers: state, memory, start-up seconds")
    doctor.add_argument("--no-setup", action="store_true", help="check the running server only")
    doctor.add_argument("--health", action="store_true", help="state of this user's servers; exit status 0: all ready")
    doctor.add_argument("--deploy", type=Path, metavar="FILE", help="show a deploy file with all that it extends")
    repository = _command(commands, "repository", "write Triton model repositories of the pipelines")
    repository.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the repositories")
    repository.add_argument("--pipeline", default="*", metavar="NAME", help="only this pipeline")
    repository.add_argument("--deploy", type=Path, metavar="FILE", help="only the pipeline of this deploy file")
    for command in (doctor, repository):
        about = "which block of deploy files counts (default: the build of the engine environment)"
        command.add_argument("--platform", choices=("cpu", "cuda"), help=about)


def local_key(address: str) -> str:
    """The operator's key of this user's supervised server with this gRPC address; empty for any other server."""
    host, _, port = address.rpartition(":")
    facts = run_folder.facts_of(port) if host in LOOPBACK_HOSTS else None
    return str(facts["key"]) if facts else ""


def _command(commands: Commands, name: str, about: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=about, description=about)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run one of COMMANDS in the engine environment; returns the exit code."""
    try:
        use_engine_python(arguments)
        return _run(options)
    except SetupError as error:
        report(f"{options.command}: {error}")
        return 1
    except KeyboardInterrupt:
        report(f"{options.command}: interrupted")
        return 130


def _run(options: argparse.Namespace) -> int:
    if options.command == "serve":
        from triton_omni.backends.supervisor.serve.command import serve

        return serve(options, report)
    if options.command == "demo":
        from triton_omni.backends.supervisor.demo import demo

        return demo(report)
    if options.command == "repository":
        from triton_omni.backends.supervisor.deployment import write_repositories

        return write_repositories(options, report)
    from triton_omni.backends.supervisor import deployment, doctor

    if options.deploy:
        return deployment.show_deploy(options, report)
    return doctor.health(report) if options.health else doctor.doctor(report)
