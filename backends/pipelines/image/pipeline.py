# SPDX-License-Identifier: Apache-2.0
"""Pipeline `image`: the embedded default, a small model of handwritten digits in colors."""

from __future__ import annotations

from pathlib import Path

from triton_omni.backends.diffusion.pipeline import image_pipeline

PIPELINE = image_pipeline(
    "image",
    package_dir=str(Path(__file__).parent),
    about={
        "sizes": ["64x64", "96x64", "64x96", "96x96", "128x96", "128x128"],
        "default_size": "64x64",
        "example": "a red 7 on a yellow background",
    },
)
