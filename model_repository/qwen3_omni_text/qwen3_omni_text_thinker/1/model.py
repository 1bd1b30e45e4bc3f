# SPDX-License-Identifier: Apache-2.0
"""Stage `thinker` of pipeline `qwen3_omni_text`. Written by `make repository`."""

from triton_omni.backends.triton.stage import TritonPythonModel  # noqa: F401
