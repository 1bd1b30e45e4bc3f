# SPDX-License-Identifier: Apache-2.0
"""The public model of pipeline `qwen3_tts`: its orchestrator. Written by `make repository`."""

from triton_omni.backends.triton.orchestrator import TritonPythonModel  # noqa: F401
