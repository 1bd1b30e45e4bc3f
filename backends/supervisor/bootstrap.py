# SPDX-License-Identifier: Apache-2.0
"""Run a module of a checkout before anything is installed: `python3 backends/supervisor/bootstrap.py MODULE ARGS…`.

MODULE is relative to `triton_omni`. The folders `client/` and `backends/` are imported as `triton_omni` and
`triton_omni.backends`; an installation maps them the same way (pyproject.toml, `package-dir`). Standard library only.
This file must be readable by old versions of Python, so that they can be reported: no annotations here.
"""

import runpy
import sys
import types
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SUPPORTED = ((3, 11), (3, 12))


def unsupported_python(version):
    """Why this Python version cannot be used; an empty text if it can."""
    if tuple(version[:2]) in SUPPORTED:
        return ""
    return (
        f"Triton-Omni's local server needs Python 3.11 or 3.12, this is {version[0]}.{version[1]} ({sys.executable}): "
        "its stubs need numpy 1.26, and "
        "vLLM needs 3.11.\n  Workaround: make setup PYTHON=python3.11 (Debian: apt-get install python3.11-venv "
        "libpython3.11; also fine: uv python install 3.12, conda create python=3.12)"
    )


def map_packages(repo=REPO):
    """Make `triton_omni` and `triton_omni.backends` packages of the folders of a checkout."""
    for name, folder in (("triton_omni", "client"), ("triton_omni.backends", "backends")):
        package = types.ModuleType(name)
        package.__path__ = [str(repo / folder)]
        package.__file__ = str(repo / folder / "__init__.py")
        sys.modules[name] = package
    setattr(sys.modules["triton_omni"], "backends", sys.modules["triton_omni.backends"])  # noqa: B010 - for the type checker


def main():
    """Run the module named by the first argument with the other arguments."""
    reason = unsupported_python(sys.version_info)
    if reason:
        sys.exit("setup: " + reason)
    sys.path.pop(0)  # the folder of this file: its modules are not top-level modules
    map_packages()
    runpy.run_module("triton_omni." + sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
