# SPDX-License-Identifier: Apache-2.0
"""Stage `code2wav`: frames of codes to sound by transformers' network, in windows with left context.

The network trims both ends of what its transposed convolutions make, so a window of F frames gives
F * samples_per_frame - tail samples: the last `tail` samples of a window appear with the next window's first ones.
A window's left context is decoded again; with `left_context_frames` beyond the reach of the network's attention
(layers * sliding window) cutting changes nothing, with the usual 25 it changes little and costs a twentieth.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from backends.ar.options import OptionsError, checkpoint_folder
from backends.codec.decoder import Window
from backends.codec.engine import CodecEngine, CodecOptions
from backends.core.errors import BadRequest
from backends.core.pipeline import EngineContext

SAMPLE_RATE_HZ = 24_000
PREFIX = "code2wav."


class Code2WavOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """model: folder of the whole checkpoint; chunks: options of the codec engine (backends/codec/engine.py)."""

    model: str
    dtype: str = "float32"
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    left_context_frames: Annotated[int, msgspec.Meta(ge=1)] = 25
    chunks: CodecOptions = CodecOptions(first_chunk_frames=4, chunk_frames=25)


class Code2Wav:
    """backends.codec.decoder.Decoder of Qwen3-Omni."""

    right = 0
    sample_rate_hz = SAMPLE_RATE_HZ

    def __init__(self, network: Qwen3OmniMoeCode2Wav, left: int, device: str) -> None:
        self._network = network
        self._device = device
        self.left = left
        self.codes: int = network.config.num_quantizers
        self.samples_per_frame = int(network.total_upsample)
        self._codebook: int = network.config.codebook_size
        self.tail = self.samples_per_frame - self._run(np.zeros((1, 1, self.codes), np.int16)).shape[1]

    def start(self) -> None:
        return None

    def check(self, codes: np.ndarray) -> None:
        if codes.size and (codes.min() < 0 or codes.max() >= self._codebook):
            raise BadRequest(f"codes must be from 0 to below {self._codebook}", "codes")

    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        """Shorter windows are filled up at the end: no sample that is kept depends on a frame behind its window."""
        longest = max(len(window.codes) for window in windows)
        padded = np.zeros((len(windows), longest, self.codes), np.int16)
        for row, window in zip(padded, windows, strict=True):
            row[: len(window.codes)] = window.codes
        waves = self._run(padded)
        return [wave[self._kept(window)] for wave, window in zip(waves, windows, strict=True)]

    def _kept(self, window: Window) -> slice:
        begin = max(0, window.left * self.samples_per_frame - self.tail)
        return slice(begin, len(window.codes) * self.samples_per_frame - self.tail)

    @torch.inference_mode()
    def _run(self, codes: np.ndarray) -> np.ndarray:
        """(windows, frames, books) → (windows, samples) float32."""
        books = torch.from_numpy(codes.astype(np.int64)).transpose(1, 2).to(self._device)
        return self._network(books)[:, 0].float().cpu().numpy()


def make_code2wav(context: EngineContext) -> CodecEngine:
    """The engine of stage `code2wav`."""
    try:
        options = msgspec.convert(dict(context.options), Code2WavOptions)
    except msgspec.ValidationError as error:
        raise OptionsError(f"stage '{context.stage}', engine options: {error}") from None
    folder = checkpoint_folder(options.model, context.models_dir)
    config: Any = AutoConfig.from_pretrained(folder)
    network: Any = Qwen3OmniMoeCode2Wav._from_config(config.code2wav_config)
    network.load_state_dict(weights_of(folder))
    network.eval().to(context.device, getattr(torch, options.dtype))
    return CodecEngine(context.stage, Code2Wav(network, options.left_context_frames, context.device), options.chunks)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The network's own tensors out of the checkpoint's files, without reading the rest."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({file for name, file in places.items() if name.startswith(PREFIX)})
    else:
        files = ["model.safetensors"]
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(PREFIX)]  # noqa: SIM118 - not a dict
            found |= {name.removeprefix(PREFIX): tensors.get_tensor(name) for name in names}
    if not found:
        raise OptionsError(f"{folder} holds no tensors '{PREFIX}…': a checkpoint without speech?")
    return found
