# SPDX-License-Identifier: Apache-2.0
"""A supervised server for a `with` body: for the demo, the self-check and tests. Standard library only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton_omni.backends.config import paths
from triton_omni.backends.supervisor.errors import SetupError
from triton_omni.backends.supervisor.serve import processes, run_folder

_STOP_TIMEOUT_S = 90.0
_FOLDERS = (paths.HOME_VARIABLE, paths.ENGINE_PYTHON_VARIABLE, paths.MODELS_VARIABLE, paths.SERVER_VARIABLE)


@contextmanager
def temporary_server(
    options: Sequence[str], output: int, timeout_s: float, variables: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """`serve` with these options on free ports, stopped afterwards; yields its facts (see Supervisor).

    output     descriptor for its output
    variables  for its environment, beyond ours

    Raises SetupError if it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="triton-omni-") as folder:
        info = Path(folder) / "server.json"
        command = [str(paths.engine_python()), "-m", "triton_omni.cli", "serve", "--any-port", "--info-file", str(info)]
        folders = {name: str(paths.absolute(value)) for name in _FOLDERS if (value := os.environ.get(name))}
        environment = {**os.environ, **folders, **(variables or {})}
        child = processes.start([*command, *options], environment, output, folder)
        try:
            processes.wait_until(lambda: info.exists() or child.poll() is not None, timeout_s)
            facts = run_folder.read_json(info)
            if facts is None:
                raise SetupError("the server did not become ready", hint="read its output above; by hand: make serve")
            yield facts
        finally:
            processes.stop(child, _STOP_TIMEOUT_S)
