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
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from triton_omni.backends.ar.options import checkpoint_folder
from triton_omni.backends.codec.decoder import Window
from triton_omni.backends.codec.engine import CodecEngine, CodecOptions
from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_omni.checkpoints import config_of

SAMPLE_RATE_HZ = 24_000
PREFIX = "code2wav."


class Code2WavOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the decoder runs.

    model               folder of the whole checkpoint
    cuda_graph_windows  numbers of windows, such as [1, 4, 16], for which the network is captured as a CUDA graph at
                        start; more windows at once, and longer ones than the deployment's chunks, run without
    chunks              options of the codec engine (backends/codec/engine.py)
    """

    model: str
    dtype: str = "float32"
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    left_context_frames: Annotated[int, msgspec.Meta(ge=1)] = 25
    cuda_graph_windows: tuple[Annotated[int, msgspec.Meta(ge=1, le=256)], ...] = ()
    chunks: CodecOptions = CodecOptions(first_chunk_frames=4, chunk_frames=25)


class Code2Wav:
    """triton_omni.backends.codec.decoder.Decoder of Qwen3-Omni."""

    right = 0
    sample_rate_hz = SAMPLE_RATE_HZ

    def __init__(self, network: Qwen3OmniMoeCode2Wav, left: int, device: str) -> None:
        self._network = network
        self._graphs: list[Graph] = []
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

    def capture(self, windows: Sequence[int], chunk_frames: int) -> None:
        """From now on up to so many windows of usual length run as a CUDA graph."""
        frames = self.left + chunk_frames
        self._graphs = [Graph(self._network, count, self.codes, frames, self._device) for count in sorted(windows)]

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
        books = torch.from_numpy(codes.astype(np.int64)).transpose(1, 2)
        graph = next((graph for graph in self._graphs if graph.fits(books)), None)
        waves = self._network(books.to(self._device)) if graph is None else graph.run(books)
        return waves[:, 0].float().cpu().numpy()


class Graph:
    """The network captured for one shape. Smaller ones are filled up: neither windows nor samples depend on what is
    behind them. Not run on a GPU yet: tests/reference/test_ar_omni_code2wav.py compares it where there is one."""

    def __init__(self, network: Qwen3OmniMoeCode2Wav, windows: int, books: int, frames: int, device: str) -> None:
        self._codes = torch.zeros((windows, books, frames), dtype=torch.int64, device=device)
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(3):  # lets libraries choose and allocate before anything is recorded
                network(self._codes)
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self._graph):
            self._waves = network(self._codes)

    def fits(self, codes: torch.Tensor) -> bool:
        return codes.shape[0] <= self._codes.shape[0] and codes.shape[2] <= self._codes.shape[2]

    def run(self, codes: torch.Tensor) -> torch.Tensor:
        """(windows, books, frames) → (windows, 1, samples), which the next run overwrites; samples may be more."""
        windows, _, frames = codes.shape
        self._codes.zero_()
        self._codes[:windows, :, :frames].copy_(codes)
        self._graph.replay()
        return self._waves[:windows]


def make_code2wav(context: EngineContext) -> CodecEngine:
    """The engine of stage `code2wav`."""
    try:
        options = msgspec.convert(dict(context.options), Code2WavOptions)
    except msgspec.ValidationError as error:
        raise OptionsError(f"stage '{context.stage}', engine options: {error}") from None
    if options.cuda_graph_windows and context.device != "cuda":
        raise OptionsError(f"stage '{context.stage}': cuda_graph_windows needs device cuda, this is {context.device}")
    folder = checkpoint_folder(options.model, context.models_dir)
    config = config_of(str(folder))
    network: Any = Qwen3OmniMoeCode2Wav._from_config(config.code2wav_config)
    network.load_state_dict(weights_of(folder))
    network.eval().to(context.device, getattr(torch, options.dtype))
    decoder = Code2Wav(network, options.left_context_frames, context.device)
    decoder.capture(options.cuda_graph_windows, options.chunks.chunk_frames)
    return CodecEngine(context.stage, decoder, options.chunks)


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
