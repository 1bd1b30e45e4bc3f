# SPDX-License-Identifier: Apache-2.0
"""A loaded image model in the pieces that a step engine needs: encode, prepare, predict, update, decode."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.diffusion.batching import make_forward
from triton_omni.backends.diffusion.edit import EditEncoder
from triton_omni.backends.diffusion.forward import Forward, Prediction
from triton_omni.backends.diffusion.image_params import FieldName, ImageSpec
from triton_omni.backends.diffusion.image_run import ImageRun, InpaintState
from triton_omni.backends.diffusion.lora import LoraAdapters
from triton_omni.backends.diffusion.memory import ImageMemory
from triton_omni.backends.diffusion.options import SIZE_MULTIPLE, DiffusionOptions, ImageLimits
from triton_omni.backends.diffusion.parallel.context import check_divisible
from triton_omni.backends.diffusion.parallel.forward import ParallelForward
from triton_omni.backends.diffusion.parallel.ranks import RankGroup
from triton_omni.backends.diffusion.preview import PreviewDecoder
from triton_omni.backends.diffusion.step_cache import StepCachedForward
from triton_omni.backends.diffusion.text import EncodeTasks, EncodingCache, Prompt, PromptEncoder
from triton_omni.backends.diffusion.upstream import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    be_quiet,
    calculate_shift,
)
from triton_omni.backends.diffusion.vae import one_frame_codec, stock_codec

log = logging.getLogger("triton_omni.diffusion")

COMPONENTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler", "prompt_template_encode")


def find_model(name: str, package_dir: str, models_dir: str) -> Path:
    """The folder that a deploy value names; raises OptionsError if it holds no model."""
    if name.startswith("package:"):
        folder = Path(package_dir, name.removeprefix("package:"))
    else:
        folder = Path(models_dir, name) if models_dir else Path(name)
    if not (folder / "model_index.json").is_file():
        raise OptionsError(f"model '{name}': {folder / 'model_index.json'} does not exist")
    return folder


class ImageModel:
    """The modules of one diffusers pipeline and the arithmetic between them. Holds no state of any run."""

    def __init__(self, folder: Path, options: DiffusionOptions, device: str, models_dir: str = "") -> None:
        self.device = torch.device(device)
        self.options = options
        pipe = self._load(folder)
        self.factor: int = pipe.vae_scale_factor
        self.codec = stock_codec(pipe.vae, options.vae_tiling) if options.keeps_vae else one_frame_codec(pipe.vae)
        self.edit_encoder: EditEncoder | None = None
        if hasattr(pipe, "processor"):
            self.edit_encoder = EditEncoder(pipe, self.device, self.codec, options.defaults.source_pixels)
            pipe = QwenImagePipeline(**{name: part for name, part in pipe.components.items() if name != "processor"})
        self.pipe = pipe
        self.text = PromptEncoder(pipe, self.device)
        self.cache = EncodingCache(options.cache_bytes)
        self.encode_count = 0
        """Encode tasks computed so far."""
        self.loras = LoraAdapters(self.pipe, {n: Path(models_dir, f) for n, f in options.loras.items()})
        self._offload_and_compile()
        with torch.inference_mode():
            self.preview_decoder = PreviewDecoder(self.codec, self.factor, pipe.vae.dtype, self.device)
        self.forward, self.ranks = self._make_forward(folder)
        self.memory = ImageMemory(self.pipe, options, self.device)
        threshold = options.step_cache_threshold
        self.step_cached = StepCachedForward(self.pipe.transformer, threshold) if threshold else None

    def _load(self, folder: Path) -> DiffusionPipeline:
        """The checkpoint's own pipeline class, checked and on the device."""
        name = self.options.model
        be_quiet()
        pipe = DiffusionPipeline.from_pretrained(folder, dtype=getattr(torch, self.options.dtype))
        missing = [component for component in COMPONENTS if not hasattr(pipe, component)]
        if missing:
            raise OptionsError(f"model '{name}': {type(pipe).__name__} has no {', '.join(missing)}")
        if pipe.vae_scale_factor * 2 != SIZE_MULTIPLE:
            raise OptionsError(f"model '{name}': a token is {pipe.vae_scale_factor * 2} pixels, not {SIZE_MULTIPLE}")
        if self.options.offload == "none":
            pipe.to(self.device)
        for module in (pipe.transformer, pipe.vae, pipe.text_encoder):
            module.eval().requires_grad_(False)
        return pipe

    def _offload_and_compile(self) -> None:
        """Apply diffusers' own offload and compilation."""
        offload = self.options.offload
        if offload != "none" and self.device.type == "cpu":
            raise OptionsError(f"offload: {offload}: needs a GPU; this stage runs on the CPU")
        if offload == "model":
            self.pipe.enable_model_cpu_offload(device=self.device)
        elif offload == "sequential":
            self.pipe.enable_sequential_cpu_offload(device=self.device)
        if self.options.compile:
            self.pipe.transformer.compile_repeated_blocks(dynamic=True)

    def _make_forward(self, folder: Path) -> tuple[Forward, RankGroup | None]:
        own = make_forward(self.pipe.transformer, self.options)
        if self.options.parallel.ranks == 1:
            return own, None
        ranks = RankGroup(folder, self.options, self.device, self.pipe.transformer)
        return ParallelForward(own, ranks, self.options), ranks

    def restrict(self, limits: ImageLimits) -> ImageLimits:
        """`limits`, reduced to what this checkpoint supports."""
        encoder = self.edit_encoder
        return msgspec.structs.replace(
            limits,
            max_source_images=0 if encoder is None else min(limits.max_source_images, encoder.max_source_images),
            masks=limits.masks and encoder is not None and encoder.mask_processor is not None,
        )

    def prompt(self, spec: ImageSpec, text: str) -> Prompt:
        """Encode the prompt or the negative prompt in the model's template."""
        if self.edit_encoder is not None and spec.source_images:
            return self.edit_encoder.prompt(text, spec.source_images)
        return self.text.prompt(text)

    def check(self, spec: ImageSpec, at: FieldName) -> None:
        """Refuse options that this deployment does not support."""
        check_divisible(spec.image_tokens + spec.source_tokens, self.options.parallel, self.device, at("width"))
        if spec.lora and spec.lora not in self.loras.names:
            names = ", ".join(self.loras.names) or "none"
            raise BadRequest(f"unknown LoRA '{spec.lora}'; this stage has: {names}", at("lora"))
        if spec.lora_scale != 1.0 and not spec.lora:
            raise BadRequest("needs a LoRA (`lora`)", at("lora_scale"))
        if spec.step_cache and self.step_cached is None:
            raise BadRequest("this stage has no step cache (deploy: step_cache_threshold)", at("step_cache"))

    def predict(self, batch: Sequence[ImageRun]) -> list[Prediction]:
        """One forward of runs with equal batch keys."""
        spec = batch[0].spec
        self.loras.activate(spec.lora, spec.lora_scale)
        if spec.step_cache and self.step_cached is not None:
            return self.step_cached.predict(batch)
        return self.forward.predict(batch)

    def forget(self, image_run: ImageRun) -> None:
        """Free state of a run that has ended."""
        if self.step_cached is not None:
            self.step_cached.drop(image_run)

    def close(self) -> None:
        """Free cached state and end the other ranks."""
        self.forward.forget()
        if self.ranks is not None:
            self.ranks.close()

    # --- one run -------------------------------------------------------------------------------------------------
    def missing(self, image_run: ImageRun) -> EncodeTasks:
        """Encode tasks still to be computed before the first step; cached results are taken over."""
        if not image_run.encode_tasks:
            image_run.encode_tasks = self._encode_tasks(image_run)
        for key in image_run.encode_tasks:
            cached = self.cache.get(key)
            if cached is not None:
                image_run.encoded[key] = cached
        return {key: task for key, task in image_run.encode_tasks.items() if key not in image_run.encoded}

    def encode(self, image_run: ImageRun) -> None:
        """Compute all missing tasks of a text-only run, or the first missing task of an edit."""
        for key, task in list(self.missing(image_run).items())[: 1 if image_run.spec.source_images else None]:
            image_run.encoded[key] = task()
            self.cache.put(key, image_run.encoded[key])
            self.encode_count += 1

    def _encode_tasks(self, image_run: ImageRun) -> EncodeTasks:
        if self.edit_encoder is not None and image_run.spec.source_images:
            return self.edit_encoder.encode_tasks(image_run)
        return {(prompt, ()): partial(self.text.features, prompt) for prompt in image_run.prompts()}

    def prepare(self, image_run: ImageRun) -> None:
        """Features, noise and schedule, as in the stock pipeline. All encode tasks must be done."""
        spec = image_run.spec
        generator = torch.Generator().manual_seed(image_run.seed)  # on the CPU: the same noise on every device
        features = [image_run.encoded[prompt, image_run.image_digests] for prompt in image_run.prompts()]
        image_run.positive, image_run.negative = features[0], features[1] if len(features) == 2 else None
        if self.edit_encoder is not None and spec.source_images:
            image_run.condition = self.edit_encoder.condition(image_run, generator)
        image_run.encode_tasks, image_run.encoded = {}, {}
        channels = self.pipe.transformer.config.in_channels // 4
        image_run.latents = self.pipe.prepare_latents(
            spec.n, channels, spec.height, spec.width, features[0].dtype, self.device, generator
        )
        image_run.scheduler = self._scheduler(image_run)
        image_run.timesteps = image_run.scheduler.timesteps
        if self.edit_encoder is not None and spec.mask is not None:
            image_run.inpaint = self.edit_encoder.inpaint_state(image_run)

    def _scheduler(self, image_run: ImageRun) -> FlowMatchEulerDiscreteScheduler:
        """A scheduler of the run's own; the defaults are those of diffusers' pipeline."""
        scheduler = copy.deepcopy(self.pipe.scheduler)
        config = scheduler.config
        shift = calculate_shift(
            image_run.current_latents().shape[1],
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        steps = image_run.spec.steps
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift, device=self.device)
        scheduler.set_begin_index(0)
        return scheduler

    def update(self, image_run: ImageRun, prediction: Prediction, wants_preview: bool) -> torch.Tensor | None:
        """Guidance and one scheduler step; returns the latents predicted for the final image, if wanted."""
        velocity = prediction.positive
        if prediction.negative is not None:
            guided = prediction.negative + image_run.spec.true_cfg_scale * (velocity - prediction.negative)
            norm = torch.norm(velocity, dim=-1, keepdim=True)
            velocity = guided * (norm / torch.norm(guided, dim=-1, keepdim=True))
        scheduler, latents = image_run.scheduler, image_run.current_latents()
        preview = latents - scheduler.sigmas[image_run.step] * velocity if wants_preview else None
        image_run.latents = scheduler.step(velocity, image_run.timestep(), latents, return_dict=False)[0]
        image_run.step += 1
        if image_run.inpaint is not None:
            return self._restore_unmasked(image_run, image_run.inpaint, preview)
        return preview

    def _restore_unmasked(
        self, image_run: ImageRun, inpaint: InpaintState, preview: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Reset what a masked edit must not change to the source image, at the current noise level."""
        source, mask = image_run.condition, inpaint.mask
        assert source is not None
        noised = source
        if image_run.steps_left:
            noised = image_run.scheduler.scale_noise(source, image_run.timestep()[None], inpaint.noise)
        image_run.latents = (1 - mask) * noised + mask * image_run.current_latents()
        return None if preview is None else (1 - mask) * source + mask * preview

    # --- images --------------------------------------------------------------------------------------------------
    def decode(self, latents: torch.Tensor, width: int, height: int) -> npt.NDArray[np.uint8]:
        """Latents (n, image tokens, channels) to RGB pixels (n, height, width, 3)."""
        return _rgb(self.codec.decode(self._unpack(latents, width, height))[:, :, 0])

    def preview(self, latents: torch.Tensor, width: int, height: int) -> npt.NDArray[np.uint8]:
        """An approximation of `decode` by a linear function."""
        return _rgb(self.preview_decoder(self._unpack(latents, width, height)))

    def _unpack(self, latents: torch.Tensor, width: int, height: int) -> torch.Tensor:
        """Latents in the VAE's layout: (n, channels, 1, height / 8, width / 8)."""
        vae = self.pipe.vae
        unpacked = self.pipe._unpack_latents(latents, height, width, self.factor).to(vae.dtype)
        mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(unpacked.device, unpacked.dtype)
        scale = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(unpacked.device, unpacked.dtype)
        return unpacked / scale + mean


def _rgb(pixels: torch.Tensor) -> npt.NDArray[np.uint8]:
    """(n, 3, height, width) in -1..1 to (n, height, width, 3) in 0..255."""
    values = (pixels * 0.5 + 0.5).clamp(0, 1).cpu().permute(0, 2, 3, 1).float().numpy()
    return np.ascontiguousarray((values * 255).round().astype(np.uint8))
