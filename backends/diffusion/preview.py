# SPDX-License-Identifier: Apache-2.0
"""Fast previews: a picture as a linear function of its latents, eight pixels a side to each.

The function is the least-squares fit to the checkpoint's own VAE: colours and gradients are encoded, the latents
decoded, and the decoded colours explained by the latents. It sees colours and places, no details.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from triton_omni.backends.diffusion.vae import Codec

SIDE = 128
COARSENESS = (2, 4, 8)  # patches a side; what a denoiser's early pictures look like


class Sketch:
    """Latents as the VAE has them, (n, channels, 1, h, w), to RGB in -1..1, (n, 3, 8h, 8w). Fitted when made: three
    small pictures there and back. Call in inference mode."""

    def __init__(self, codec: Codec, factor: int, dtype: torch.dtype, device: torch.device) -> None:
        self._codec, self._factor, self._dtype, self._device = codec, factor, dtype, device
        self._map = self._fit()

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        colours = torch.einsum("nchw,cr->nrhw", latents[:, :, 0].float(), self._map[:-1])
        colours = colours + self._map[-1].view(1, 3, 1, 1)
        return F.interpolate(colours, scale_factor=self._factor, mode="bilinear").clamp(-1.0, 1.0)

    def _fit(self) -> torch.Tensor:
        """(channels + 1, 3): the last row is the colour of zeros."""
        generator = torch.Generator().manual_seed(0)
        rows: list[torch.Tensor] = []
        colours: list[torch.Tensor] = []
        for patches in COARSENESS:
            small = torch.rand(1, 3, patches, patches, generator=generator).round() * 2 - 1  # pure colours
            picture = F.interpolate(small, (SIDE, SIDE), mode="bilinear").to(self._device, self._dtype)
            latents = self._codec.encode(picture[:, :, None]).mode()
            decoded = F.avg_pool2d(self._codec.decode(latents)[:, :, 0].float(), self._factor)
            rows.append(latents[0, :, 0].float().flatten(1).T)
            colours.append(decoded[0].flatten(1).T)
        seen = torch.cat(rows)
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1).cpu()
        return torch.linalg.lstsq(seen, torch.cat(colours).cpu()).solution.to(self._device)
