# SPDX-License-Identifier: Apache-2.0
"""Stage `denoiser` of pipeline `qwen_image_edit`. Written by `make repository`."""

from triton_omni.backends.triton.stage import TritonPythonModel  # noqa: F401
