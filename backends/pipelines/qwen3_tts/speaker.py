# SPDX-License-Identifier: Apache-2.0
"""The network that makes a vector of a voice, ECAPA-TDNN (Desplanques, Thienpondt, Demuynck, 2020), by the names of the
checkpoint's tensors. Time is the last dimension of all tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.audio_utils import mel_filter_bank

from triton_omni.backends.pipelines.qwen3_tts.checkpoint import SpeakerFacts

FFT, HOP = 1024, 256
HIGHEST_HZ = 12_000.0
QUIETEST = 1e-5  # of a mel band, before the logarithm
LEAST_VARIANCE = 1e-12


class SpeakerNetwork(nn.Module):
    """Samples (samples,) at the checkpoint's rate → a voice's vector (enc_dim,)."""

    mel_filters: torch.Tensor
    window: torch.Tensor

    def __init__(self, facts: SpeakerFacts) -> None:
        super().__init__()
        widths, kernels, dilations = facts.enc_channels, facts.enc_kernel_sizes, facts.enc_dilations
        middle = range(1, len(widths) - 1)
        self.blocks = nn.ModuleList(
            (
                Tdnn(facts.mel_dim, widths[0], kernels[0], dilations[0]),
                *(SqueezedBlock(facts, widths[i - 1], widths[i], kernels[i], dilations[i]) for i in middle),
            )
        )
        self.mfa = Tdnn(widths[-1], widths[-1], kernels[-1], dilations[-1])
        self.asp = AttentivePooling(widths[-1], facts.enc_attention_channels)
        self.fc = nn.Conv1d(2 * widths[-1], facts.enc_dim, 1)
        filters = mel_filter_bank(
            FFT // 2 + 1, facts.mel_dim, 0.0, HIGHEST_HZ, facts.sample_rate, norm="slaney", mel_scale="slaney"
        )
        self.register_buffer("mel_filters", torch.from_numpy(filters.T).float(), persistent=False)
        self.register_buffer("window", torch.hann_window(FFT), persistent=False)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        hidden, found = self._mels(samples), list[torch.Tensor]()
        for block in self.blocks:
            hidden = block(hidden)
            found.append(hidden)
        return self.fc(self.asp(self.mfa(torch.cat(found[1:], 1))))[0, :, 0]

    def _mels(self, samples: torch.Tensor) -> torch.Tensor:
        """Logarithms of mel bands (1, bands, steps)."""
        edge = (FFT - HOP) // 2
        padded = F.pad(samples[None], (edge, edge), mode="reflect")
        spectrum = torch.stft(padded, FFT, HOP, FFT, self.window, center=False, return_complex=True)
        magnitude = (torch.view_as_real(spectrum).square().sum(-1) + 1e-9).sqrt()
        return (self.mel_filters @ magnitude).clamp(min=QUIETEST).log()


class Tdnn(nn.Module):
    """A convolution that keeps the length, mirrored at the ends, and ReLU."""

    def __init__(self, width_in: int, width_out: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width_in, width_out, kernel, dilation=dilation, padding="same", padding_mode="reflect")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv(inputs))


class Res2Net(nn.Module):
    """Groups of channels, each after the first convolved together with the result of the one before."""

    def __init__(self, width: int, groups: int, kernel: int, dilation: int) -> None:
        super().__init__()
        group = width // groups
        self.blocks = nn.ModuleList(Tdnn(group, group, kernel, dilation) for _ in range(groups - 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, *groups = inputs.chunk(len(self.blocks) + 1, 1)
        outputs = [first]
        for block, group in zip(self.blocks, groups, strict=True):
            outputs.append(block(group if len(outputs) == 1 else group + outputs[-1]))
        return torch.cat(outputs, 1)


class Squeeze(nn.Module):
    """Scales channels by what their means over time say."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(width, inner, 1), nn.Conv1d(inner, width, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        means = inputs.mean(2, keepdim=True)
        return inputs * self.conv2(F.relu(self.conv1(means))).sigmoid()


class SqueezedBlock(nn.Module):
    """TDNN, Res2Net, TDNN and squeeze, beside which the input passes."""

    def __init__(self, facts: SpeakerFacts, width_in: int, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.tdnn1 = Tdnn(width_in, width, 1, 1)
        self.res2net_block = Res2Net(width, facts.enc_res2net_scale, kernel, dilation)
        self.tdnn2 = Tdnn(width, width, 1, 1)
        self.se_block = Squeeze(width, facts.enc_se_channels)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(inputs))))


class AttentivePooling(nn.Module):
    """Mean and deviation over time (1, 2 * width, 1), each step weighted by what it says about the whole."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.tdnn = Tdnn(3 * width, inner, 1, 1)
        self.conv = nn.Conv1d(inner, width, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        steps = inputs.shape[2]
        even = _statistics(inputs, inputs.new_full((1, 1, steps), 1 / steps))
        whole = even.expand(-1, -1, steps)
        weights = self.conv(torch.tanh(self.tdnn(torch.cat([inputs, whole], 1)))).softmax(2)
        return _statistics(inputs, weights)


def _statistics(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean and deviation (1, 2 * width, 1) of (1, width, steps)."""
    mean = (weights * inputs).sum(2, keepdim=True)
    variance = (weights * (inputs - mean).square()).sum(2, keepdim=True)
    return torch.cat([mean, variance.clamp(min=LEAST_VARIANCE).sqrt()], 1)
