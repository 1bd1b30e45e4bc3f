# SPDX-License-Identifier: Apache-2.0
"""Pipeline `qwen3_omni_text`: the thinker alone."""
