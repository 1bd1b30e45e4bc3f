# SPDX-License-Identifier: Apache-2.0
"""Train the `digits` checkpoint: a QwenImagePipeline for handwritten digits in colors.

    python -m triton_omni.backends.tools.digits.train train WORK OUT     about 40 CPU minutes, one thread
    python -m triton_omni.backends.tools.digits.train check OUT          classifies 200 images per size

Data: scikit-learn's 8 x 8 digits (UCI optical recognition of handwritten digits, CC BY 4.0). 1000 of them are
training data; the other 797 are held out for the reader that classifies the images. All seeds are pinned; training
is resumed from WORK if it was interrupted. Equal weights on another machine are not claimed.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from triton_omni.backends.diffusion.upstream import (
    AutoencoderKLQwenImage,
    ModelMixin,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from triton_omni.backends.diffusion.vae import reduce_to_one_frame
from triton_omni.backends.tools.digits import data
from triton_omni.backends.tools.digits.small_model import (
    Sizes,
    make_scheduler,
    make_text_encoder,
    make_tokenizer,
    make_transformer,
    make_vae,
)

log = logging.getLogger("train_digits")

SIZES = Sizes(layers=4, heads=4, head_dim=24, rope_axes=(8, 8, 8))
TRAINING_DIGITS = 1000
VAE_STEPS, STEPS, COOL_DOWN = 1200, 12000, 0.25
SMALL_FIRST = 2500
"""Steps on 64 x 64 alone, where a step is cheapest, before the other sizes join."""
MIXTURE: dict[tuple[int, int], float] = {
    (64, 64): 0.40, (128, 128): 0.32, (96, 64): 0.10, (64, 96): 0.06, (96, 96): 0.06, (128, 96): 0.06,
}  # fmt: skip
"""(width, height) → share of the steps."""
CHECKED = ((64, 64), (96, 64), (128, 128))


# --- data -----------------------------------------------------------------------------------------------------
def training_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Digits (n, 8, 8) in 0..1 and labels for training: those on whose label four of their five neighbors agree."""
    digits, labels = _shuffled()
    digits, labels = digits[:TRAINING_DIGITS], labels[:TRAINING_DIGITS]
    flat = digits.reshape(len(digits), -1)
    distances = torch.cdist(flat, flat)
    distances.fill_diagonal_(math.inf)
    neighbors = labels[distances.topk(5, largest=False).indices]
    clear = (neighbors == labels[:, None]).sum(1) >= 4
    return digits[clear], labels[clear]


def save_held_out() -> None:
    """Write the held-out digits, which the reader in tests uses."""
    digits, labels = _shuffled()
    values = (digits[TRAINING_DIGITS:] * 16).round().to(torch.uint8).numpy()
    np.savez_compressed(data.HELD_OUT, digits=values, labels=labels[TRAINING_DIGITS:].to(torch.uint8).numpy())


def _shuffled() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    order = np.random.RandomState(0).permutation(len(bunch.target))
    return torch.from_numpy(bunch.images.astype(np.float32)[order] / 16), torch.from_numpy(bunch.target[order])


def render(digits: torch.Tensor, pairs: list[tuple[str, str]], width: int, height: int) -> torch.Tensor:
    """Images (n, 3, height, width) in -1..1: the digit fills the middle square."""
    side = min(width, height)
    alpha = F.interpolate(digits[:, None], size=(side, side), mode="bicubic", align_corners=False).clamp(0, 1)
    left, top = (width - side) // 2, (height - side) // 2
    alpha = F.pad(alpha, (left, width - side - left, top, height - side - top))
    ink = torch.tensor([data.INKS[i] for i, _ in pairs], dtype=torch.float32)[:, :, None, None] / 127.5 - 1
    paper = torch.tensor([data.BACKGROUNDS[b] for _, b in pairs], dtype=torch.float32)[:, :, None, None] / 127.5 - 1
    return paper * (1 - alpha) + ink * alpha


# --- VAE ------------------------------------------------------------------------------------------------------
def train_vae(vae: AutoencoderKLQwenImage, digits: torch.Tensor) -> None:
    """A regularized autoencoder with a little fixed noise; mostly on crops, which are cheaper."""
    reduce_to_one_frame(vae)
    rng, noise = random.Random(1), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=VAE_STEPS, pct_start=0.1)
    others = [s for s in MIXTURE if s != (64, 64)]
    for step in range(VAE_STEPS):
        crop = 32 if step < 0.85 * VAE_STEPS else 0
        width, height = others[step // 2 % len(others)] if step % 2 else (64, 64)
        count = 32 if crop else 8
        x = render(
            digits[torch.randint(len(digits), (count,), generator=noise)],
            [data.random_colors(rng) for _ in range(count)],
            width,
            height,
        )
        if crop:
            top, left = 8 * rng.randrange((height - crop) // 8 + 1), 8 * rng.randrange((width - crop) // 8 + 1)
            x = x[:, :, top : top + crop, left : left + crop]
        mean, log_variance = vae.quant_conv(vae.encoder(x[:, :, None])).chunk(2, 1)
        z = mean + 0.05 * torch.randn(mean.shape, generator=noise)
        y = vae.decoder(vae.post_quant_conv(z))[:, :, 0]
        size = mean.square().mean() + 0.1 * (log_variance + 6).square().mean()
        loss = F.l1_loss(y, x) + F.mse_loss(y, x) + 1e-3 * size
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            log.info("vae step %d l1 %.4f cpu %.0f s", step, F.l1_loss(y, x).item(), time.process_time())


def finished_vae(work: Path, digits: torch.Tensor) -> AutoencoderKLQwenImage:
    """The trained VAE, with mean and standard deviation of its latents in its config."""
    path = work / "vae"
    if not path.exists():
        trained = make_vae(SIZES, seed=1)
        stock = make_vae(SIZES, seed=1)
        train_vae(trained, digits)
        copy_frame_weights(trained, stock)
        reduced = make_vae(SIZES, seed=1)
        reduced.load_state_dict(stock.state_dict())
        reduce_to_one_frame(reduced)
        latents, _ = make_pool(reduced, digits, torch.zeros(len(digits)), (64, 64), count=2048, seed=9)
        mean, std = latents.mean((0, 2, 3)).tolist(), latents.std((0, 2, 3)).tolist()
        stock.register_to_config(latents_mean=[round(v, 4) for v in mean], latents_std=[round(v, 4) for v in std])
        stock.save_pretrained(path)
    vae = AutoencoderKLQwenImage.from_pretrained(path).eval()
    vae.register_to_config(_name_or_path="digits/vae")  # not the folder of the training run
    return vae


def copy_frame_weights(reduced: AutoencoderKLQwenImage, stock: AutoencoderKLQwenImage) -> None:
    """Put the weights of a one-frame VAE back into the stock form (other time slices stay random, and unused)."""
    target = stock.state_dict()
    for name, value in reduced.state_dict().items():
        if target[name].dim() == value.dim() + 1:
            target[name][:, :, -1] = value
        else:
            target[name].copy_(value)
    stock.load_state_dict(target)


@torch.no_grad()
def make_pool(
    vae: AutoencoderKLQwenImage,
    digits: torch.Tensor,
    labels: torch.Tensor,
    size: tuple[int, int],
    count: int,
    seed: int,
) -> tuple[torch.Tensor, list[data.Reading]]:
    """Latents (count, channels, height / 8, width / 8) of random images, and what they show."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    latents: list[torch.Tensor] = []
    shown: list[data.Reading] = []
    while len(shown) < count:
        chosen = torch.randint(len(digits), (64,), generator=generator)
        pairs = [data.random_colors(rng) for _ in range(64)]
        images = render(digits[chosen], pairs, *size)
        latents.append(vae.quant_conv(vae.encoder(images[:, :, None])).chunk(2, 1)[0][:, :, 0])
        shown += [data.Reading(int(labels[i]), *pair) for i, pair in zip(chosen, pairs, strict=True)]
    return torch.cat(latents), shown


def make_pools(
    work: Path, digits: torch.Tensor, labels: torch.Tensor
) -> dict[tuple[int, int], tuple[torch.Tensor, list[data.Reading]]]:
    """Per size: normalized latents, and what they show."""
    reduced = AutoencoderKLQwenImage.from_pretrained(work / "vae").eval()
    reduce_to_one_frame(reduced)
    mean = torch.tensor(reduced.config["latents_mean"])[None, :, None, None]
    std = torch.tensor(reduced.config["latents_std"])[None, :, None, None]
    pools: dict[tuple[int, int], tuple[torch.Tensor, list[data.Reading]]] = {}
    for i, size in enumerate(MIXTURE):
        latents, shown = make_pool(reduced, digits, labels, size, 8192 if i < 2 else 3072, seed=10 + i)
        pools[size] = ((latents - mean) / std, shown)
    log.info("latents ready, cpu %.0f s", time.process_time())
    return pools


# --- transformer ----------------------------------------------------------------------------------------------
class Prompts:
    """Prompt → text features, computed once each."""

    def __init__(self, pipe: QwenImagePipeline) -> None:
        self._pipe = pipe
        self._known: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def batch(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (n, longest, dim) padded with zeros, and the mask of real tokens."""
        new = sorted({t for t in texts if t not in self._known})
        if new:
            features, mask = self._pipe.encode_prompt(new)
            for i, text in enumerate(new):
                length = features.shape[1] if mask is None else int(mask[i].sum())
                self._known[text] = features[i, :length].clone()
        rows = [self._known[t] for t in texts]
        mask = torch.zeros(len(rows), max(len(r) for r in rows), dtype=torch.bool)
        for i, row in enumerate(rows):
            mask[i, : len(row)] = True
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), mask


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(n, c, h, w) → (n, h/2 * w/2, 4c), as the pipeline packs."""
    n, c, h, w = latents.shape
    return latents.view(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(n, h // 2 * w // 2, c * 4)


class Trainer:
    """Flow matching (v = noise - image) with an average of the weights; its state survives an interruption."""

    def __init__(self, transformer: QwenImageTransformer2DModel, prompts: Prompts) -> None:
        self.model, self.prompts = transformer, prompts
        self.pools: dict[tuple[int, int], tuple[torch.Tensor, list[data.Reading]]] = {}
        self.optimizer = torch.optim.AdamW(
            transformer.parameters(), lr=2e-3, weight_decay=1e-4, betas=(0.9, 0.98), fused=True
        )
        self.average = [p.detach().clone() for p in transformer.parameters()]
        self.rng, self.noise = random.Random(3), torch.Generator().manual_seed(3)
        self.step, self.loss = 0, 1.0

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "average": self.average,
            "rng": self.rng.getstate(), "noise": self.noise.get_state(), "step": self.step, "loss": self.loss,
        }  # fmt: skip
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=False)  # our own file
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average, self.step, self.loss = state["average"], state["step"], state["loss"]
        self.rng.setstate(state["rng"])
        self.noise.set_state(state["noise"])

    def rate(self, steps: int) -> float:
        """Warm up, hold, and cool down over the last quarter."""
        left = (steps - self.step) / (COOL_DOWN * steps)
        return 2e-3 * min(1.0, (self.step + 1) / 100, max(left, 0.01))

    def advance(self, steps: int) -> None:
        """One optimizer step of `steps`."""
        size = (64, 64)
        if self.step >= SMALL_FIRST:
            size = self.rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
        latents, shown = self.pools[size]
        count = 64 if size[0] * size[1] <= 6144 else 32
        chosen = torch.randint(len(latents), (count,), generator=self.noise)
        image = pack(latents[chosen])
        texts = [" " if self.rng.random() < 0.1 else data.random_prompt(self.rng, shown[i]) for i in chosen.tolist()]
        features, mask = self.prompts.batch(texts)
        sigma = torch.sigmoid(torch.randn(count, generator=self.noise) * 1.2 + 0.3)
        noise = torch.randn(image.shape, generator=self.noise)
        mixed = (1 - sigma)[:, None, None] * image + sigma[:, None, None] * noise
        velocity = self.model(
            hidden_states=mixed, timestep=sigma, encoder_hidden_states=features, encoder_hidden_states_mask=mask,
            img_shapes=[[(1, size[1] // 16, size[0] // 16)]] * count, return_dict=False,
        )[0]  # fmt: skip
        loss = F.mse_loss(velocity, noise - image)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(steps)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        keep = min(0.999, (self.step + 1) / (self.step + 20))
        with torch.no_grad():
            for average, parameter in zip(self.average, self.model.parameters(), strict=True):
                average.lerp_(parameter, 1 - keep)
        self.loss = 0.98 * self.loss + 0.02 * loss.item()
        self.step += 1

    def use_average(self) -> None:
        with torch.no_grad():
            for parameter, average in zip(self.model.parameters(), self.average, strict=True):
                parameter.copy_(average)


def quiet_start(transformer: ModelMixin) -> None:
    """Begin as almost the identity: small modulation, zero output."""
    with torch.no_grad():
        for block in transformer.transformer_blocks:
            block.img_mod[1].weight.mul_(0.1)
            block.txt_mod[1].weight.mul_(0.1)
        transformer.proj_out.weight.zero_()
        transformer.proj_out.bias.zero_()


def train(work: Path, out: Path, steps: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    save_held_out()
    digits, labels = training_digits()
    log.info("%d clear digits of %d", len(digits), TRAINING_DIGITS)
    vae = finished_vae(work, digits)
    tokenizer = make_tokenizer()
    encoder = make_text_encoder(len(tokenizer), SIZES, seed=0)
    transformer = make_transformer(SIZES, seed=2)
    quiet_start(transformer)
    pipe = QwenImagePipeline(make_scheduler(), vae, encoder, tokenizer, transformer)
    trainer = Trainer(transformer, Prompts(pipe))
    state = work / "state.pt"
    if state.exists():
        trainer.load(state)
    if trainer.step < steps:
        trainer.pools = make_pools(work, digits, labels)
    transformer.train()
    while trainer.step < steps:
        trainer.advance(steps)
        if trainer.step % 250 == 0:
            log.info("step %d loss %.4f cpu %.0f s", trainer.step, trainer.loss, time.process_time())
            trainer.save(state)
    trainer.use_average()
    pipe.to(torch.float16).save_pretrained(out)


# --- check ----------------------------------------------------------------------------------------------------
@torch.no_grad()
def check(out: Path, count: int) -> None:
    """Generate `count` images per size with the stock pipeline and classify them."""
    reader = data.held_out_reader()
    pipe: Any = QwenImagePipeline.from_pretrained(out, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    digits, labels = training_digits()
    right = [reader.digit(d.numpy() * 16) == int(n) for d, n in zip(digits, labels, strict=True)]
    log.info("the reader on the model's own digits: %.3f", np.mean(right))
    for width, height in CHECKED:
        digit = color = 0
        wrong: list[tuple[int, int]] = []
        cases = data.evaluation_set(count)
        for start in range(0, count, 20):
            texts, wanted = zip(*cases[start : start + 20], strict=True)
            images = pipe(
                list(texts), negative_prompt=[" "] * len(texts), true_cfg_scale=2.5, width=width, height=height,
                num_inference_steps=12, output_type="np",
                generator=[torch.Generator().manual_seed(start + i) for i in range(len(texts))],
            ).images  # fmt: skip
            for image, want in zip(images, wanted, strict=True):
                seen = reader.read((image * 255).round().astype(np.uint8))
                digit += seen.digit == want.digit
                color += seen[1:] == want[1:]
                if seen.digit != want.digit:
                    wrong.append((want.digit, seen.digit))
        log.info("%dx%d: digit %.3f colors %.3f wrong %s", width, height, digit / count, color / count, wrong)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("work", type=Path)
    training.add_argument("out", type=Path)
    training.add_argument("--steps", type=int, default=STEPS)
    checking = commands.add_parser("check")
    checking.add_argument("out", type=Path)
    checking.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "train":
        train(args.work, args.out, args.steps)
    else:
        check(args.out, args.count)


if __name__ == "__main__":
    main()
