# SPDX-License-Identifier: Apache-2.0
"""The client installs and starts in seconds: nothing heavy, and of the server only its wire contract."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "vllm", "transformers", "diffusers", "onnxruntime", "scipy")
PROGRAM = (
    "import sys, json, triton_omni.ask, triton_omni.top, triton_omni.openai.http.app, triton_omni.openai.__main__; "
    "print(json.dumps([*sys.modules]))"
)


def test_nothing_heavy_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    modules = json.loads(done.stdout)
    assert not [m for m in modules if m.split(".")[0] in HEAVY]
    own = [m for m in modules if m.startswith("triton_omni.backends.")]
    assert "triton_omni.backends.wire" in own
    assert not [
        m
        for m in own
        if m != "triton_omni.backends.wire"
        and not (m + ".").startswith(("triton_omni.backends.core.", "triton_omni.backends.telemetry."))
    ]
