# SPDX-License-Identifier: Apache-2.0
"""Fast previews: RGB as a linear function of latents, one color per latent position, upsampled.

The function is a least-squares fit to the checkpoint's own VAE: color patterns are encoded and decoded, and the decoded
colors are regressed on the latents. It shows colors and layout, no details.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from triton_omni.backends.diffusion.vae import ImageCodec

SIDE = 128
PATTERN_PATCHES = (2, 4, 8)  # patches per side of the fitted patterns; early denoised images are as coarse


class PreviewDecoder:
    """Latents (n, channels, 1, h, w) to RGB in -1..1, (n, 3, 8h, 8w).

    The constructor encodes and decodes three small images; call it in inference mode.
    """

    def __init__(self, codec: ImageCodec, factor: int, dtype: torch.dtype, device: torch.device) -> None:
        self._codec, self._factor, self._dtype, self._device = codec, factor, dtype, device
        self._weights = self._fit()

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        colors = torch.einsum("nchw,cr->nrhw", latents[:, :, 0].float(), self._weights[:-1])
        colors = colors + self._weights[-1].view(1, 3, 1, 1)
        return F.interpolate(colors, scale_factor=self._factor, mode="bilinear").clamp(-1.0, 1.0)

    def _fit(self) -> torch.Tensor:
        """(channels + 1, 3); the last row is the bias."""
        generator = torch.Generator().manual_seed(0)
        latent_rows: list[torch.Tensor] = []
        color_rows: list[torch.Tensor] = []
        for patches in PATTERN_PATCHES:
            small = torch.rand(1, 3, patches, patches, generator=generator).round() * 2 - 1  # pure colors
            image = F.interpolate(small, (SIDE, SIDE), mode="bilinear").to(self._device, self._dtype)
            latents = self._codec.encode(image[:, :, None]).mode()
            decoded = F.avg_pool2d(self._codec.decode(latents)[:, :, 0].float(), self._factor)
            latent_rows.append(latents[0, :, 0].float().flatten(1).T)
            color_rows.append(decoded[0].flatten(1).T)
        inputs = torch.cat(latent_rows)
        inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1).cpu()
        return torch.linalg.lstsq(inputs, torch.cat(color_rows).cpu()).solution.to(self._device)
