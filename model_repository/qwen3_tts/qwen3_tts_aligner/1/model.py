# SPDX-License-Identifier: Apache-2.0
"""Stage `aligner` of pipeline `qwen3_tts`. Written by `make repository`."""

from triton_omni.backends.triton.stage import TritonPythonModel  # noqa: F401
