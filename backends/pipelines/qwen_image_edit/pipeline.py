# SPDX-License-Identifier: Apache-2.0
"""Pipeline `qwen_image_edit`: Qwen-Image-Edit; edits images, and generates images from text alone."""

from __future__ import annotations

from pathlib import Path

from triton_omni.backends.diffusion.options import MAX_SOURCE_IMAGES
from triton_omni.backends.diffusion.pipeline import image_pipeline

PIPELINE = image_pipeline(
    "qwen_image_edit",
    package_dir=str(Path(__file__).parent),
    about={"sizes": ["auto", "1024x1024", "1328x1328", "1664x928", "928x1664", "1472x1104", "1104x1472"]},
    max_source_images=MAX_SOURCE_IMAGES,
)
