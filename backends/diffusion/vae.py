# SPDX-License-Identifier: Apache-2.0
"""The one-frame form of a causal video VAE.

A still image is a video of one frame. A causal 3-D convolution then sees zeros for every earlier frame, so only the
last time slice of its kernel matters. The equivalent 2-D convolution gives the same values (1e-6), is two to five times
faster and avoids the frame cache that makes the stock decoder stateful.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from triton_omni.backends.diffusion.upstream import (
    AutoencoderKLQwenImage,
    DiagonalGaussianDistribution,
    QwenImageCausalConv3d,
)


class FrameConv(nn.Module):
    """The 2-D equivalent of a causal 3-D convolution for one frame: (b, c, 1, h, w) in and out."""

    def __init__(self, conv: QwenImageCausalConv3d) -> None:
        super().__init__()
        assert conv.stride[0] == 1, "a strided time axis has no one-frame form"
        self.weight = nn.Parameter(conv.weight.detach()[:, :, -1].contiguous())
        self.bias = None if conv.bias is None else nn.Parameter(conv.bias.detach().clone())
        self.stride = conv.stride[1:]
        left, _, top, _, _, _ = conv._padding
        self.padding = (int(top), int(left))

    def forward(self, x: torch.Tensor, cache: torch.Tensor | None = None) -> torch.Tensor:
        assert x.shape[2] == 1 and cache is None, "this VAE was reduced to one frame"
        return F.conv2d(x[:, :, 0], self.weight, self.bias, self.stride, self.padding)[:, :, None]


def reduce_to_one_frame(module: nn.Module) -> list[tuple[FrameConv, QwenImageCausalConv3d]]:
    """Replace every causal 3-D convolution below `module` in place; returns (new, old) pairs."""
    pairs: list[tuple[FrameConv, QwenImageCausalConv3d]] = []
    for name, child in module.named_children():
        if isinstance(child, QwenImageCausalConv3d) and child.stride[0] == 1:
            frame_conv = FrameConv(child)
            setattr(module, name, frame_conv)
            pairs.append((frame_conv, child))
        else:
            pairs += reduce_to_one_frame(child)
    return pairs


class ImageCodec(NamedTuple):
    """A VAE's encoder and decoder: images (n, 3, 1, 8h, 8w) in -1..1, latents (n, channels, 1, h, w)."""

    encode: Callable[[torch.Tensor], DiagonalGaussianDistribution]
    decode: Callable[[torch.Tensor], torch.Tensor]


def one_frame_codec(vae: AutoencoderKLQwenImage) -> ImageCodec:
    """The VAE in one-frame form; modifies `vae`."""
    reduce_to_one_frame(vae)
    return ImageCodec(
        lambda pixels: DiagonalGaussianDistribution(vae.quant_conv(vae.encoder(pixels))),
        lambda latents: vae.decoder(vae.post_quant_conv(latents)).clamp(-1.0, 1.0),
    )


def stock_codec(vae: AutoencoderKLQwenImage, tiling: bool) -> ImageCodec:
    """The VAE's own methods. They keep state inside the module: one image at a time."""
    if tiling:
        vae.enable_tiling()
    return ImageCodec(
        lambda pixels: vae.encode(pixels, return_dict=False)[0],
        lambda latents: vae.decode(latents, return_dict=False)[0],
    )
