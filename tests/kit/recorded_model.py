# SPDX-License-Identifier: Apache-2.0
"""A Triton repository of tiny models that keep an instance record and answer probes: what a supervisor watches."""

from __future__ import annotations

from pathlib import Path

_MODEL = """
import json
import os
import threading
from pathlib import Path

import triton_python_backend_utils as pb_utils

from triton_omni.backends.control import Hub
from triton_omni.backends.control.messages import PingMessage
from triton_omni.backends.control.records import InstanceRecord, touch_record, write_record
from triton_omni.backends.supervisor.serve.processes import start_time


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        folder = Path(os.environ["TRITON_OMNI_RUN_DIR"])
        name = args["model_name"]
        hub = Hub(name, folder / f"{name}.sock")
        threading.Thread(target=answer, args=(hub, folder, name), daemon=True).start()
        write_record(folder, InstanceRecord(
            model=name, instance="0_0", role=parameters["role"]["string_value"], pid=os.getpid(),
            start_time=start_time(os.getpid()), address=hub.address, state="ready",
        ))

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", t)]) for t in tensors]


def answer(hub, folder, name):
    mute = folder / f"{name}.mute"
    while True:
        for peer, item in hub.poll(0.25):
            if isinstance(item, PingMessage) and not mute.exists():
                peer.send(PingMessage(state="ready"))
        touch_record(folder, name, "0_0")
"""
_CONFIG = """
backend: "python"
max_batch_size: 0
input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
parameters {{ key: "role" value {{ string_value: "{role}" }} }}
"""


def write_recorded_models(repository: Path, roles: dict[str, str]) -> Path:
    """Write one model per entry (name → "stage" or "orchestrator"); returns the repository."""
    for name, role in roles.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(_CONFIG.format(role=role))
        (version / "model.py").write_text(_MODEL)
    return repository
