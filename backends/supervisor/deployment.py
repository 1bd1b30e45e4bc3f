# SPDX-License-Identifier: Apache-2.0
"""Deploy files on the command line: model repositories made of them, and where each of their values comes from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from triton_omni.backends import repository
from triton_omni.backends.config import paths
from triton_omni.backends.config.schema import ConfigError
from triton_omni.backends.deploy.layers import leaves, read_layers, values_of
from triton_omni.backends.deploy.load import to_deploy
from triton_omni.backends.supervisor.errors import Report, SetupError

_HINT = "correct {file}; docs/operations.md explains the keys"
_VALUE_COLUMN = 72


def write_deployed(out: Path, deploy_files: Sequence[Path], platform: paths.Build) -> list[Path]:
    """Write a model repository per deploy file below `out`; returns them. Raises SetupError for an unusable file."""
    for count, file in enumerate(deploy_files, 1):
        try:
            repository.write(out, file, platform)
            if len(list(out.glob("*"))) < count:
                raise ConfigError(f"{file}: another deploy file is for the same pipeline")
        except (ConfigError, LookupError) as error:
            raise SetupError(str(error), hint=_HINT.format(file=file)) from None
    return sorted(out.glob("*"))


def write_repositories(options: argparse.Namespace, report: Report) -> int:
    """`triton-omni repository`; returns the exit code."""
    files = [options.deploy] if options.deploy else repository.deploy_files(options.pipeline)
    if not files:
        raise SetupError(f"no pipeline is called {options.pipeline}", hint="omit --pipeline to write all of them")
    written: list[str] = []
    for file in files:
        try:
            written += repository.write(options.out, file, options.platform or paths.engine_build())
        except (ConfigError, LookupError) as error:
            raise SetupError(str(error), hint=_HINT.format(file=file)) from None
    report(f"{options.out}: {len(written)} file(s) written")
    return 0


def show_deploy(options: argparse.Namespace, report: Report) -> int:
    """`triton-omni doctor --deploy FILE`: each merged value and its origin, then all errors; returns the exit code."""
    file, platform = options.deploy, options.platform or paths.engine_build()
    try:
        tree, files = read_layers(file, platform)
        report(f"# platform {platform}; {' < '.join(map(str, files))}")
        for keys, leaf in leaves(tree):
            line = f"{keys}: {leaf.value!r}"
            report(f"{line:{_VALUE_COLUMN}} # {leaf.origin}")
        errors = repository.check(to_deploy(values_of(tree), file.name))
    except (ConfigError, LookupError) as error:
        errors = str(error).splitlines()
    for error in errors:
        report(f"error: {error}")
    return 1 if errors else 0
