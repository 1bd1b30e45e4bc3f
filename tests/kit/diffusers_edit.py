# SPDX-License-Identifier: Apache-2.0
"""diffusers' own edit pipelines with the parameters of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.tiny_edit import SOURCE_PIXELS
from triton_omni.backends.core.engine import Run

torch = pytest.importorskip("torch")


def load_stock(kind: Any, folder: Path, dtype: Any = torch.float32) -> Any:
    """A pipeline of diffusers."""
    from triton_omni.backends.diffusion.upstream import be_quiet

    be_quiet()
    pipe = kind.from_pretrained(folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def use_small_source_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stock pipelines resize images to SOURCE_PIXELS instead of a megapixel; nothing else changes."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

    stock, part = pipeline_qwenimage_edit.calculate_dimensions, SOURCE_PIXELS / (1024 * 1024)
    for name, values in (("edit", 3), ("edit_inpaint", 3), ("edit_plus", 2)):
        place = f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{name}.calculate_dimensions"
        monkeypatch.setattr(place, lambda area, ratio, values=values: stock(area * part, ratio)[:values])


def edit_with(pipe: Any, run: Run, output: str) -> list[np.ndarray]:
    """What it makes of a run's request: "pil" or "latent"."""
    from PIL import Image

    asked, (message,) = run.request.stages["denoiser"], run.request.messages
    flat = np.asarray(run.inputs["image"].data)
    items = [
        Image.fromarray(flat[p.offset : p.offset + p.length].reshape(p.shape))
        for p in message.parts
        if p.type == "image"
    ]
    masks = [i for i in items if i.mode == "L"]
    given = [i for i in items if i.mode == "RGB"]
    more: dict[str, Any] = {k: asked[k] for k in ("width", "height") if k in asked}
    if masks:
        more |= {"mask_image": masks[0], "strength": 1.0}
    negative = asked.get("negative_prompt")
    return [
        np.asarray(image)
        for image in pipe(
            image=given if "Plus" in type(pipe).__name__ else given[0],
            prompt=message.parts[-1].text,
            negative_prompt=negative,
            true_cfg_scale=asked["true_cfg_scale"] if negative else 1.0,
            num_inference_steps=asked["steps"],
            num_images_per_prompt=asked.get("n", 1),
            generator=torch.Generator().manual_seed(asked["seed"]),
            output_type=output,
            **more,
        ).images
    ]
