# SPDX-License-Identifier: Apache-2.0
"""Stage `tokens` of pipeline `toy`. Written by `make repository`."""

from triton_omni.backends.triton.stage import TritonPythonModel  # noqa: F401
