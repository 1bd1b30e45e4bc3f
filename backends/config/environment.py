# SPDX-License-Identifier: Apache-2.0
"""Environment variables of child processes that run another Python environment. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

INTERPRETER_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that make a Python find the packages of another environment."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that lead a Python to another environment's packages."""
    return {name: value for name, value in environ.items() if name not in INTERPRETER_VARIABLES}
