# SPDX-License-Identifier: Apache-2.0
"""Pipeline `qwen_image`: Qwen-Image from its own weights."""
