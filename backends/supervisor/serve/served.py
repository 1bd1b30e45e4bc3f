# SPDX-License-Identifier: Apache-2.0
"""A supervised server for the `with` body: of the demo, the self-check and the tests. Standard library only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton_omni.backends.config import paths
from triton_omni.backends.supervisor.errors import Problem
from triton_omni.backends.supervisor.serve import processes
from triton_omni.backends.supervisor.serve import run_folder as rundir

_STOP_TIMEOUT_S = 90.0
_PLACES = (paths.HOME_VARIABLE, paths.ENGINE_PYTHON_VARIABLE, paths.MODELS_VARIABLE)


@contextmanager
def served(
    options: Sequence[str], output: int, timeout_s: float, variables: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """`serve` with these options on free ports, ended afterwards; yields its facts (see Supervisor).

    output     descriptor that its words go to
    variables  for its environment, beyond ours

    Raises Problem if it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="triton-omni-") as folder:
        info = Path(folder) / "server.json"
        command = [
            str(paths.engine_python()),
            "-m",
            "triton_omni.backends.supervisor",
            "serve",
            "--any-port",
            "--info-file",
            str(info),
        ]
        places = {name: str(paths.absolute(given)) for name in _PLACES if (given := os.environ.get(name))}
        environment = {**os.environ, **places, **(variables or {})}
        child = processes.start([*command, *options], environment, output, folder)
        try:
            processes.wait_until(lambda: info.exists() or child.poll() is not None, timeout_s)
            facts = rundir.read_json(info)
            if facts is None:
                raise Problem("the server did not become ready", "see what it says; by hand: make serve")
            yield facts
        finally:
            processes.stop(child, _STOP_TIMEOUT_S)
