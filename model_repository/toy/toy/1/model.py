# SPDX-License-Identifier: Apache-2.0
"""The public model of pipeline `toy`: its orchestrator. Written by `make repository`."""

from triton_omni.backends.triton.orchestrator import TritonPythonModel  # noqa: F401
