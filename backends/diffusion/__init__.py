# SPDX-License-Identifier: Apache-2.0
"""The diffusion engine: many pictures advance together, one denoise step at a time."""
