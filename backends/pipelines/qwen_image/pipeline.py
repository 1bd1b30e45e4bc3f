# SPDX-License-Identifier: Apache-2.0
"""Pipeline `qwen_image`: Qwen-Image; graph and engine are shared by all text-to-image models."""

from __future__ import annotations

from pathlib import Path

from triton_omni.backends.diffusion.pipeline import image_pipeline

PIPELINE = image_pipeline(
    "qwen_image",
    package_dir=str(Path(__file__).parent),
    about={
        "sizes": ["1024x1024", "1328x1328", "1664x928", "928x1664", "1472x1104", "1104x1472"],
        "default_size": "1024x1024",
    },
)
