# SPDX-License-Identifier: Apache-2.0
"""Make this test process what an AR worker would be. Call `become_ar_worker` before anything imports vllm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.kit.gpu_devices import BUILD
from triton_omni.backends.ar.environment import worker_environment


def become_ar_worker(**options: int) -> None:
    """Set the variables of a worker with these engine options; skips the test module where there is no vLLM."""
    for name, value in worker_environment(options, BUILD, Path(sys.prefix)).items():
        if name != "LD_PRELOAD":  # too late for a process that runs already
            os.environ.setdefault(name, value)
    pytest.importorskip("vllm", reason="needs the engine environment (make setup)")
