# SPDX-License-Identifier: Apache-2.0
"""A loaded picture model, in the pieces a step engine needs: encode, prepare, predict, update, decode."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.diffusion.batching import forward_of
from triton_omni.backends.diffusion.edit import Editor
from triton_omni.backends.diffusion.encoding import Cache, Pieces
from triton_omni.backends.diffusion.forward import Forward, Prediction
from triton_omni.backends.diffusion.image_params import Wish
from triton_omni.backends.diffusion.image_run import Drawing, Kept
from triton_omni.backends.diffusion.lora import Loras
from triton_omni.backends.diffusion.memory import Memory
from triton_omni.backends.diffusion.options import SIZE_MULTIPLE, DiffusionOptions, Limits
from triton_omni.backends.diffusion.parallel.context import check_shareable
from triton_omni.backends.diffusion.parallel.forward import Spread
from triton_omni.backends.diffusion.parallel.ranks import Ranks
from triton_omni.backends.diffusion.preview import Sketch
from triton_omni.backends.diffusion.step_cache import StepCached
from triton_omni.backends.diffusion.text import Prompt, PromptEncoder
from triton_omni.backends.diffusion.upstream import DiffusionPipeline, QwenImagePipeline, be_quiet, calculate_shift
from triton_omni.backends.diffusion.vae import one_frame_codec, stock_codec

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

    def __init__(self, folder: Path, options: DiffusionOptions, device: str, models_dir: str = "") -> None:
        self.device = torch.device(device)
        self.options = options
        be_quiet()
        pipe: Any = DiffusionPipeline.from_pretrained(folder, dtype=getattr(torch, options.dtype))
        lacking = [name for name in NEEDED if not hasattr(pipe, name)]
        if lacking:
            raise OptionsError(f"model '{options.model}': {type(pipe).__name__} has no {', '.join(lacking)}")
        if options.offload == "none":
            pipe.to(self.device)
        for module in (pipe.transformer, pipe.vae, pipe.text_encoder):
            module.eval().requires_grad_(False)
        self.factor: int = pipe.vae_scale_factor
        if self.factor * 2 != SIZE_MULTIPLE:
            raise OptionsError(f"model '{options.model}': a token is {self.factor * 2} pixels, not {SIZE_MULTIPLE}")
        self.codec = stock_codec(pipe.vae, options.vae_tiling) if options.keeps_vae else one_frame_codec(pipe.vae)
        self.editor: Editor | None = None
        if hasattr(pipe, "processor"):
            self.editor = Editor(pipe, self.device, self.codec, options.defaults.source_pixels)
            pipe = QwenImagePipeline(**{name: part for name, part in pipe.components.items() if name != "processor"})
        self.pipe: Any = pipe
        self.text = PromptEncoder(pipe, self.device)
        self.cache = Cache(options.cache_bytes)
        self.encoded = 0
        """Prompts and pictures encoded so far."""
        self.loras = Loras(self.pipe, {n: Path(models_dir, f) for n, f in options.loras.items()})
        self._place()
        with torch.inference_mode():
            self.sketch = Sketch(self.codec, self.factor, pipe.vae.dtype, self.device)
        own = forward_of(self.pipe.transformer, options)
        several = options.parallel.ranks > 1
        self.ranks = Ranks(folder, options, self.device, self.pipe.transformer) if several else None
        self.forward: Forward = own if self.ranks is None else Spread(own, self.ranks, options)
        self.memory = Memory(self.pipe, options, self.device)
        threshold = options.step_cache_threshold
        self.step_cached = StepCached(self.pipe.transformer, threshold) if threshold else None

    def _place(self) -> None:
        """Offload and compile with diffusers' own means."""
        offload = self.options.offload
        if offload != "none" and self.device.type == "cpu":
            raise OptionsError(
                f"offload: {offload}: moves weights between a GPU and memory; this stage runs on the CPU"
            )
        if offload == "model":
            self.pipe.enable_model_cpu_offload(device=self.device)
        elif offload == "sequential":
            self.pipe.enable_sequential_cpu_offload(device=self.device)
        if self.options.compile:
            self.pipe.transformer.compile_repeated_blocks(dynamic=True)

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

    def check(self, wish: Wish, at: str) -> None:
        """Refuse what only the deploy file could have provided."""
        check_shareable(wish.picture_tokens + wish.source_tokens, self.options.parallel, self.device, f"{at}.width")
        if wish.lora and wish.lora not in self.loras.names:
            has = ", ".join(self.loras.names) or "none"
            raise BadRequest(f"there is no LoRA '{wish.lora}'; this stage has: {has}", f"{at}.lora")
        if wish.lora_scale != 1.0 and not wish.lora:
            raise BadRequest("there is no LoRA that it could scale", f"{at}.lora_scale")
        if wish.step_cache and self.step_cached is None:
            raise BadRequest("this stage has no step cache (deploy: step_cache_threshold)", f"{at}.step_cache")

    def predict(self, batch: Sequence[Drawing]) -> list[Prediction]:
        """One forward of drawings of one manner."""
        wish = batch[0].wish
        self.loras.wear(wish.lora, wish.lora_scale)
        if wish.step_cache and self.step_cached is not None:
            return self.step_cached.predict(batch)
        return self.forward.predict(batch)

    def forget(self, drawing: Drawing) -> None:
        """Drop what is kept for a drawing that has ended."""
        if self.step_cached is not None:
            self.step_cached.drop(drawing)

    def close(self) -> None:
        """Drop what is kept, and end the other ranks."""
        self.forward.forget()
        if self.ranks is not None:
            self.ranks.close()

    # --- one drawing ---------------------------------------------------------------------------------------------
    def missing(self, drawing: Drawing) -> Pieces:
        """What is still to be computed before the first step; what is kept from other drawings is taken."""
        if not drawing.pieces:
            drawing.pieces = self._pieces(drawing)
        for key in drawing.pieces:
            kept = self.cache.get(key)
            if kept is not None:
                drawing.made[key] = kept
        return {key: compute for key, compute in drawing.pieces.items() if key not in drawing.made}

    def encode(self, drawing: Drawing) -> None:
        """Compute what is missing of its text or, for an edit, the first missing piece."""
        for key, compute in list(self.missing(drawing).items())[: 1 if drawing.wish.pictures else None]:
            drawing.made[key] = compute()
            self.cache.put(key, drawing.made[key])
            self.encoded += 1

    def _pieces(self, drawing: Drawing) -> Pieces:
        if self.editor is not None and drawing.wish.pictures:
            return self.editor.pieces(drawing)
        return {(prompt, ()): partial(self.text.features, prompt) for prompt in drawing.prompts()}

    def prepare(self, drawing: Drawing) -> None:
        """Features, noise and schedule, as the stock pipeline makes them. Nothing may be missing."""
        wish = drawing.wish
        generator = torch.Generator().manual_seed(drawing.seed)  # on the CPU: the same noise on every device
        made = [drawing.made[prompt, drawing.digests] for prompt in drawing.prompts()]
        drawing.positive, drawing.negative = (*made, None)[:2]
        if self.editor is not None and wish.pictures:
            drawing.condition = self.editor.condition(drawing, generator)
        drawing.pieces, drawing.made = {}, {}
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
        return _rgb(self.codec.decode(self._spread(latents, width, height))[:, :, 0])

    def preview(self, latents: torch.Tensor, width: int, height: int) -> npt.NDArray[np.uint8]:
        """About what `decode` would give, for next to nothing."""
        return _rgb(self.sketch(self._spread(latents, width, height)))

    def _spread(self, latents: torch.Tensor, width: int, height: int) -> torch.Tensor:
        """Latents as the VAE has them: (n, channels, 1, height / 8, width / 8)."""
        vae = self.pipe.vae
        spread = self.pipe._unpack_latents(latents, height, width, self.factor).to(vae.dtype)
        mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(spread.device, spread.dtype)
        scale = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(spread.device, spread.dtype)
        return spread / scale + mean


def _rgb(pixels: torch.Tensor) -> npt.NDArray[np.uint8]:
    """(n, 3, height, width) in -1..1 to (n, height, width, 3) in 0..255."""
    values = (pixels * 0.5 + 0.5).clamp(0, 1).cpu().permute(0, 2, 3, 1).float().numpy()
    return np.ascontiguousarray((values * 255).round().astype(np.uint8))
