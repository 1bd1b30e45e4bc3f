# SPDX-License-Identifier: Apache-2.0
"""Pipeline `qwen_image_edit`: Qwen-Image-Edit from its own weights."""
