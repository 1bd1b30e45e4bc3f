# SPDX-License-Identifier: Apache-2.0
"""Set-up's last step: a real server loads a real Python model, whose stub checks that numpy and DLPack agree."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from backends.supervisor import processes, rundir
from backends.supervisor.home import Home
from backends.supervisor.launch import Launch, free_ports, log_errors
from backends.supervisor.locate import find_server
from backends.supervisor.problem import Problem

_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0

# "compare, then refuse to load": the stub of the local server reads numpy 2 arrays wrong without a word
_MODEL = """
import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

import backends.core.pipeline


class TritonPythonModel:
    def initialize(self, args):
        values = np.arange(3, dtype=np.float32)
        tensor = pb_utils.Tensor("t", values)
        if not (tensor.as_numpy() == values).all() or not (np.from_dlpack(tensor) == values).all():
            raise RuntimeError(f"the stub reads arrays of numpy {np.__version__} wrong")

    def execute(self, requests):
        return [pb_utils.InferenceResponse([r_tensor(r)]) for r in requests]


def r_tensor(request):
    return pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
"""
_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
MODEL_NAME = "self_check"


def write_model(repository: Path, name: str = MODEL_NAME) -> None:
    """A Triton repository with one echo model that checks its stub at load."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(_CONFIG)
    (version / "model.py").write_text(_MODEL)


def check_server(home: Home) -> str:
    """Start the server with one model and ask it; returns a line for a person. Raises Problem if it fails."""
    server = find_server(home)
    log = home.logs / "self-check.log"
    log.unlink(missing_ok=True)
    start = time.monotonic()
    run_dir = rundir.make()
    with tempfile.TemporaryDirectory(prefix="triton-omni-check-") as folder:
        write_model(Path(folder))
        launch = Launch(server, [Path(folder)], free_ports(), run_dir, exit_timeout_s=10)
        child = launch.start(log)
        try:
            ready = processes.wait_until(
                lambda: launch.api().is_ready(1.0) or child.poll() is not None, _READY_TIMEOUT_S
            )
            if not ready or child.poll() is not None:
                raise Problem(
                    f"the server does not start:\n{log_errors(log)}", f"read {log}; make setup after the cure"
                )
            seconds = time.monotonic() - start
            tensor = {"name": "IN", "shape": [2], "datatype": "FP32", "data": [1.5, 2.5]}
            status, answer = launch.api().call("POST", f"/v2/models/{MODEL_NAME}/infer", {"inputs": [tensor]})
            if status != 200 or answer["outputs"][0]["data"] != [1.5, 2.5]:
                raise Problem(f"the server answers wrongly: {status} {answer}", f"read {log}")
        finally:
            processes.stop(child, _STOP_TIMEOUT_S)
            run_dir.remove()
    return f"server ready with a Python model after {seconds:.1f} s; its stub reads numpy and DLPack right"
