# SPDX-License-Identifier: Apache-2.0
"""A loaded picture model, in the pieces a step engine needs: encode, prepare, predict, update, decode."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from backends.diffusion.drawing import Drawing, Kept
from backends.diffusion.edit import Editor
from backends.diffusion.forward import Forward, OneByOne, Padded, Prediction
from backends.diffusion.options import SIZE_MULTIPLE, DiffusionOptions, Limits, OptionsError, Wish
from backends.diffusion.packed import Packed, lacks
from backends.diffusion.text import Prompt, PromptEncoder
from backends.diffusion.upstream import DiffusionPipeline, QwenImagePipeline, be_quiet, calculate_shift
from backends.diffusion.vae import one_frame_codec, stock_codec

log = logging.getLogger("triton_omni.diffusion")

NEEDED = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler", "prompt_template_encode")


def find_model(name: str, package_dir: str, models_dir: str) -> Path:
    """The folder a deploy value names; raises OptionsError if there is none."""
    if name.startswith("package:"):
        folder = Path(package_dir, name.removeprefix("package:"))
    else:
        folder = Path(models_dir, name) if models_dir else Path(name)
    if not (folder / "model_index.json").is_file():
        raise OptionsError(f"model '{name}': {folder / 'model_index.json'} is missing")
    return folder


class Model:
    """The modules of one diffusers pipeline and the arithmetic between them. Holds nothing of any run."""

    def __init__(self, folder: Path, options: DiffusionOptions, device: str) -> None:
        self.device = torch.device(device)
        self.options = options
        be_quiet()
        pipe: Any = DiffusionPipeline.from_pretrained(folder, dtype=getattr(torch, options.dtype))
        lacking = [name for name in NEEDED if not hasattr(pipe, name)]
        if lacking:
            raise OptionsError(f"model '{options.model}': {type(pipe).__name__} has no {', '.join(lacking)}")
        pipe.to(self.device)
        for module in (pipe.transformer, pipe.vae, pipe.text_encoder):
            module.eval().requires_grad_(False)
        self.factor: int = pipe.vae_scale_factor
        if self.factor * 2 != SIZE_MULTIPLE:
            raise OptionsError(f"model '{options.model}': a token is {self.factor * 2} pixels, not {SIZE_MULTIPLE}")
        as_stock = options.batching == "seq" or options.vae_tiling
        self.codec = stock_codec(pipe.vae, options.vae_tiling) if as_stock else one_frame_codec(pipe.vae)
        self.editor: Editor | None = None
        if hasattr(pipe, "processor"):
            self.editor = Editor(pipe, self.device, self.codec, options.defaults.source_pixels)
            pipe = QwenImagePipeline(**{name: part for name, part in pipe.components.items() if name != "processor"})
        self.pipe: Any = pipe
        self.text = PromptEncoder(pipe, self.device, options.text_cache)
        self.forward = self._forward()

    def _forward(self) -> Forward:
        transformer = self.pipe.transformer
        if self.options.batching == "seq":
            return OneByOne(transformer)
        if self.options.batching == "pad":
            return Padded(transformer)
        problem = lacks(transformer)
        if problem:
            raise OptionsError(
                f"model '{self.options.model}' cannot be packed: {problem}; say `batching: pad` or `batching: seq`"
            )
        return Packed(transformer, self.options.threads)

    def within(self, limits: Limits) -> Limits:
        """The part of `limits` that this checkpoint can do."""
        editor = self.editor
        return msgspec.structs.replace(
            limits,
            max_pictures=0 if editor is None else min(limits.max_pictures, editor.max_pictures),
            masks=limits.masks and editor is not None and editor.masks is not None,
        )

    def prompt(self, wish: Wish, text: str) -> Prompt:
        """The wish's prompt or negative prompt in its template."""
        if self.editor is not None and wish.pictures:
            return self.editor.prompt(text, wish.pictures)
        return self.text.prompt(text)

    # --- one drawing ---------------------------------------------------------------------------------------------
    def prepare(self, drawing: Drawing) -> None:
        """Features, noise and schedule, as the stock pipeline makes them."""
        wish = drawing.wish
        generator = torch.Generator().manual_seed(drawing.seed)  # on the CPU: the same noise on every device
        if self.editor is not None and wish.pictures:
            self.editor.look(drawing, generator)
        else:
            drawing.positive = self.text.features(drawing.prompt)
            if drawing.negative_prompt is not None:
                drawing.negative = self.text.features(drawing.negative_prompt)
        channels = self.pipe.transformer.config.in_channels // 4
        drawing.latents = self.pipe.prepare_latents(
            wish.n, channels, wish.height, wish.width, drawing.branches()[0].dtype, self.device, generator
        )
        drawing.scheduler = copy.deepcopy(self.pipe.scheduler)
        config = drawing.scheduler.config
        shift = calculate_shift(
            drawing.noisy().shape[1],
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        sigmas = np.linspace(1.0, 1 / wish.steps, wish.steps)
        drawing.scheduler.set_timesteps(sigmas=sigmas, mu=shift, device=self.device)
        drawing.scheduler.set_begin_index(0)
        drawing.timesteps = drawing.scheduler.timesteps
        if self.editor is not None and wish.mask is not None:
            drawing.kept = self.editor.kept(drawing)

    def update(self, drawing: Drawing, prediction: Prediction, wants_preview: bool) -> torch.Tensor | None:
        """Guidance and one scheduler step; returns the picture as it would be now, if that is wanted."""
        velocity = prediction.positive
        if prediction.negative is not None:
            guided = prediction.negative + drawing.wish.true_cfg_scale * (velocity - prediction.negative)
            norm = torch.norm(velocity, dim=-1, keepdim=True)
            velocity = guided * (norm / torch.norm(guided, dim=-1, keepdim=True))
        latents = drawing.noisy()
        preview = latents - drawing.scheduler.sigmas[drawing.step] * velocity if wants_preview else None
        drawing.latents = drawing.scheduler.step(velocity, drawing.time(), latents, return_dict=False)[0]
        drawing.step += 1
        if drawing.kept is not None:
            return self._keep(drawing, drawing.kept, preview)
        return preview

    def _keep(self, drawing: Drawing, kept: Kept, preview: torch.Tensor | None) -> torch.Tensor | None:
        """Put back what a masked edit must not change, as noisy as the rest is now; the same in the preview."""
        source = drawing.condition
        assert source is not None
        noisy = source
        if drawing.steps_left:
            noisy = drawing.scheduler.scale_noise(source, drawing.time()[None], kept.noise)
        drawing.latents = (1 - kept.mask) * noisy + kept.mask * drawing.noisy()
        return None if preview is None else (1 - kept.mask) * source + kept.mask * preview

    def decode(self, latents: torch.Tensor, width: int, height: int) -> npt.NDArray[np.uint8]:
        """Latents (n, image tokens, channels) to RGB pixels (n, height, width, 3)."""
        vae = self.pipe.vae
        spread = self.pipe._unpack_latents(latents, height, width, self.factor).to(vae.dtype)
        mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(spread.device, spread.dtype)
        scale = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(spread.device, spread.dtype)
        pixels = self.codec.decode(spread / scale + mean)[:, :, 0]
        values = (pixels * 0.5 + 0.5).clamp(0, 1).cpu().permute(0, 2, 3, 1).float().numpy()
        return np.ascontiguousarray((values * 255).round().astype(np.uint8))
