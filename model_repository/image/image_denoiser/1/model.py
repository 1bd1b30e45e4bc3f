# SPDX-License-Identifier: Apache-2.0
"""Stage `denoiser` of pipeline `image`. Written by `make repository`."""

from triton_omni.backends.triton.stage import TritonPythonModel  # noqa: F401
