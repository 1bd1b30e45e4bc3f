# SPDX-License-Identifier: Apache-2.0
"""Causal codec networks, whose state a run carries between chunks.

All layers are causal: a run carries the last inputs of each convolution and the keys and values of the attention's
window. Each frame is decoded once, and the joined chunks equal the network's output for all frames at once.

Transposed convolutions with overlapping kernels are of two kinds. One is cut at the right only: F frames give
F * samples_per_frame samples. The other is cut at both ends: it leaves out its first input and cannot complete the
last one, so the first chunk is some samples shorter.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet as CausalConvolution,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalTransConvNet as CausalUpsampling,
)

from triton_omni.backends.codec.decoder import Window
from triton_omni.backends.codec.engine import CodecEngine, CodecOptions
from triton_omni.backends.core.engine import OptionsError, read_engine_options
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.cuda_graphs import NotCapturedError, Recorder, difference, record_cuda_graph

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

log = logging.getLogger("triton_omni.codec")

SAMPLE_RATE_HZ = 24_000
COMPARED_BATCHES = 2
"""Batches of random inputs on which a captured step is compared with an eager one at load."""


class StatefulCodecOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the decoder runs.

    model               folder of the whole checkpoint
    cuda_graph_windows  numbers of runs, such as [1, 4, 16], for which a step of `chunks.chunk_frames` is captured as a
                        CUDA graph at start; first chunks, other lengths and more runs go without
    chunks              options of the codec engine (backends/codec/engine.py)
    """

    model: str
    dtype: str = "float32"
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    cuda_graph_windows: tuple[Annotated[int, msgspec.Meta(ge=1, le=256)], ...] = ()
    chunks: CodecOptions = CodecOptions(first_chunk_frames=2, ramp_frames=(4, 8, 16), chunk_frames=25)


class CodecConfig(Protocol):
    """Sizes of a network, by transformers' names."""

    num_quantizers: int
    codebook_size: int
    sliding_window: int


class CodecNetwork(Protocol):
    """A network made of transformers' causal blocks: codes (runs, books, frames) → samples (runs, 1, samples)."""

    config: CodecConfig
    total_upsample: int
    """Samples per frame."""
    pre_transformer: Any
    """transformers' model of rows (runs, frames, hidden)."""

    def __call__(self, codes: torch.Tensor) -> torch.Tensor: ...

    def modules(self) -> Iterator[torch.nn.Module]: ...


@dataclass(slots=True)
class CarriedState:
    """What a run's next chunk needs of those before: `tensors` in the order in which the layers use them."""

    frames: int = 0
    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])


class Pass:
    """One pass of the network over chunks of several runs.

    positions  (runs,) number of each run's first frame
    ends       length of each run's chunk, in the time steps of the layer that is computed
    old        carried tensors, each (runs, …); empty in a pass of first chunks
    new        the same for the next pass, each a list by run
    """

    def __init__(self, positions: torch.Tensor, ends: Sequence[int], old: Sequence[torch.Tensor]) -> None:
        self.positions = positions
        self.ends = list(ends)
        self.is_first = not old
        self.new: list[list[torch.Tensor]] = []
        self._old = iter(old)

    def join(self, inputs: torch.Tensor, size: int, first: int) -> torch.Tensor:
        """`inputs` (runs, …, steps, features) with `size` carried steps in front (`first` steps of zeros in a first
        chunk). What lies behind the end of a shorter run is not carried on."""
        shape = (*inputs.shape[:-2], first, inputs.shape[-1])
        joined = torch.cat([inputs.new_zeros(shape) if self.is_first else next(self._old), inputs], -2)
        before = first if self.is_first else size
        self.new.append(
            [row.narrow(-2, before + end - size, size).clone() for row, end in zip(joined, self.ends, strict=True)]
        )
        return joined


class StreamingNetwork:
    """transformers' network, whose causal layers take their history from the pass instead of from zeros."""

    def __init__(self, network: CodecNetwork) -> None:
        self.network = network
        self._pass: Pass
        for module in network.modules():
            if isinstance(module, CausalConvolution) and module.padding:
                module.forward = partial(self._convolve, module)  # pyright: ignore[reportAttributeAccessIssue]
            elif isinstance(module, CausalUpsampling):
                upsample = partial(self._upsample, module)
                module.forward = upsample  # pyright: ignore[reportAttributeAccessIssue]
        transformer = network.pre_transformer
        attend = partial(self._attend, transformer.forward)
        transformer.forward = attend  # pyright: ignore[reportAttributeAccessIssue]

    @torch.inference_mode()
    def run(self, codes: torch.Tensor, chunk: Pass) -> torch.Tensor:
        """Samples (runs, samples) of codes (runs, books, frames); afterwards `chunk` has the new states."""
        self._pass = chunk
        return self.network(codes)[:, 0]

    def _convolve(self, module: CausalConvolution, inputs: torch.Tensor) -> torch.Tensor:
        """Causal convolution of (runs, channels, steps)."""
        joined = self._pass.join(inputs.transpose(1, 2), module.padding, module.padding)
        return module.conv(joined.transpose(1, 2))

    def _upsample(self, module: CausalUpsampling, inputs: torch.Tensor) -> torch.Tensor:
        """Transposed convolution of (runs, channels, steps); an overlapping one needs the step before."""
        chunk, stride, cut = self._pass, module.conv.stride[0], module.right_pad
        if not cut:
            chunk.ends = [end * stride for end in chunk.ends]
            return module.conv(inputs)
        begins_late = chunk.is_first and module.left_pad > 0
        joined = chunk.join(inputs.transpose(1, 2), 1, 0 if module.left_pad else 1)
        chunk.ends = [(end - begins_late) * stride for end in chunk.ends]
        return module.conv(joined.transpose(1, 2))[..., cut:-cut]

    def _attend(self, forward: Callable[..., ModelOutput], inputs_embeds: torch.Tensor) -> ModelOutput:
        """The transformer over (runs, frames, hidden), with keys and values of the window before."""
        config = self.network.config
        kept = config.sliding_window - 1
        frames, device = inputs_embeds.shape[1], inputs_embeds.device
        query = torch.arange(frames, device=device)[:, None] + kept
        key = torch.arange(kept + frames, device=device)[None]
        positions = self._pass.positions[:, None]
        is_near = (key <= query) & (key > query - config.sliding_window)
        exists = key >= kept - positions
        mask = inputs_embeds.new_zeros(len(positions), 1, frames, kept + frames).masked_fill(
            ~(is_near & exists[:, None])[:, None], torch.finfo(inputs_embeds.dtype).min
        )
        return forward(
            inputs_embeds=inputs_embeds,
            position_ids=positions + torch.arange(frames, device=device),
            attention_mask={"full_attention": mask, "sliding_attention": mask},
            past_key_values=CarriedKeys(self._pass, kept),
            use_cache=False,
        )


class CarriedKeys:
    """Keys and values of the frames before, as transformers' attention asks for them."""

    def __init__(self, chunk: Pass, kept: int) -> None:
        self._pass = chunk
        self._kept = kept

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (runs, heads, frames, size) with those of the window before in front."""
        joined = self._pass.join(torch.stack([keys, values], 1), self._kept, self._kept)
        return joined[:, 0], joined[:, 1]


class StreamingCodec:
    """triton_omni.backends.codec.decoder.Decoder on such a network."""

    left = right = 0
    sample_rate_hz = SAMPLE_RATE_HZ

    def __init__(self, network: CodecNetwork, device: str) -> None:
        self._network = StreamingNetwork(network)
        self._graphs: list[Graph] = []
        self._device = device
        self.codes: int = network.config.num_quantizers
        self.samples_per_frame = int(network.total_upsample)
        self._codebook: int = network.config.codebook_size

    def start(self) -> CarriedState:
        return CarriedState()

    def check(self, codes: np.ndarray) -> None:
        if codes.size and (codes.min() < 0 or codes.max() >= self._codebook):
            raise BadRequest(f"codes must be from 0 to below {self._codebook}", "codes")

    def capture(self, runs: Sequence[int], chunk_frames: int, record: Recorder = record_cuda_graph) -> None:
        """From now on chunks of `chunk_frames` of up to so many runs are decoded by CUDA graphs. If one cannot be
        recorded or computes something else than the network, log one warning and use none."""
        if not runs:
            return
        state = CarriedState()
        self.decode([Window(np.zeros((chunk_frames, self.codes), np.int16), 0, 0, chunk_frames, False, state)])
        try:
            graphs = [Graph(self._network, count, chunk_frames, state.tensors, record) for count in sorted(runs)]
            for graph in graphs:
                for seed in range(COMPARED_BATCHES):
                    graph.compare(self._codebook, seed)
        except RuntimeError as error:
            log.warning("%s: the codec runs without CUDA graphs", error)
            return
        self._graphs = graphs

    def decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        first = [index for index, window in enumerate(windows) if not window.state.frames]
        later = [index for index, window in enumerate(windows) if window.state.frames]
        samples: dict[int, np.ndarray] = {}
        for group in filter(None, (first, later)):  # a first chunk gives fewer samples
            samples |= zip(group, self._decode([windows[index] for index in group]), strict=True)
        return [samples[index] for index in range(len(windows))]

    def _decode(self, windows: Sequence[Window]) -> list[np.ndarray]:
        """The same for first chunks only, or for none. Shorter ones are filled up at the end: no sample that is kept
        depends on a frame behind it."""
        states: list[CarriedState] = [window.state for window in windows]
        lengths = [len(window.codes) for window in windows]
        padded = np.zeros((len(windows), max(lengths), self.codes), np.int64)
        for row, window in zip(padded, windows, strict=True):
            row[: len(window.codes)] = window.codes
        codes = torch.from_numpy(padded).transpose(1, 2).to(self._device)
        positions = torch.tensor([state.frames for state in states], device=self._device)
        old = [torch.stack(tensors) for tensors in zip(*(state.tensors for state in states), strict=True)]
        graph = next((graph for graph in self._graphs if old and graph.fits(codes, lengths)), None)
        if graph is None:
            chunk = Pass(positions, lengths, old)
            waves = self._network.run(codes, chunk)
            new, ends = chunk.new, chunk.ends
        else:
            waves, new, ends = graph.run(codes, positions, old)
        for index, (state, length) in enumerate(zip(states, lengths, strict=True)):
            state.tensors = [tensors[index] for tensors in new]
            state.frames += length
        return [wave[:end].float().cpu().numpy() for wave, end in zip(waves, ends, strict=False)]


class Graph:
    """A step captured for one number of runs and frames; fewer runs are filled up. Not run on a GPU yet:
    tests/reference/test_ar_omni_code2wav.py compares it where there is one."""

    def __init__(
        self, network: StreamingNetwork, runs: int, frames: int, state: Sequence[torch.Tensor], record: Recorder
    ) -> None:
        """`state` is that of a run, for the shapes."""
        device = state[0].device
        books = network.network.config.num_quantizers
        self.runs = runs
        self._network = network
        self._frames = frames
        self._codes = torch.zeros((runs, books, frames), dtype=torch.int64, device=device)
        self._positions = torch.zeros(runs, dtype=torch.int64, device=device)
        self._old = [tensor.expand(runs, *tensor.shape).clone() for tensor in state]
        self._ends: list[int] = []
        self._replay, (self._waves, *self._new) = record(self._step)

    def _step(self) -> list[torch.Tensor]:
        """Samples (runs, samples), then the new states: all runs' first tensors, all runs' second ones, …"""
        chunk = Pass(self._positions, [self._frames] * self.runs, self._old)
        waves = self._network.run(self._codes, chunk)
        self._ends = chunk.ends
        return [waves, *chain.from_iterable(chunk.new)]

    def fits(self, codes: torch.Tensor, lengths: Sequence[int]) -> bool:
        return len(codes) <= self.runs and set(lengths) == {self._frames}

    def run(
        self, codes: torch.Tensor, positions: torch.Tensor, old: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[list[torch.Tensor]], list[int]]:
        """Samples (runs, samples), the new states, and numbers of samples; the next run overwrites none of them."""
        count = len(codes)
        for static, given in zip((self._codes, self._positions, *self._old), (codes, positions, *old), strict=True):
            static[:count].copy_(given)
        self._replay()
        new = [
            [tensor.clone() for tensor in self._new[first : first + count]]
            for first in range(0, len(self._new), self.runs)
        ]
        return self._waves[:count].clone(), new, self._ends[:count]

    @torch.inference_mode()
    def compare(self, codebook: int, seed: int) -> None:
        """Raise NotCapturedError if samples or states of random inputs differ from the network's."""
        generator = torch.Generator().manual_seed(seed)
        device = self._codes.device
        codes = torch.randint(0, codebook, self._codes.shape, generator=generator).to(device)
        positions = torch.randint(1, 1000, self._positions.shape, generator=generator).to(device)
        old = [torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in self._old]
        waves, new, _ = self.run(codes, positions, old)
        eager = Pass(positions, [self._frames] * self.runs, old)
        expected = self._network.run(codes, eager)
        states = ((torch.stack(ours), torch.stack(theirs)) for ours, theirs in zip(new, eager.new, strict=True))
        for ours, theirs in chain([(waves, expected)], states):
            error = difference(ours, theirs)
            if error is not None:
                raise NotCapturedError(f"a captured step of {self.runs} runs differs from an eager one ({error})")


def streaming_engine(context: EngineContext, load: Callable[[str, str], Any]) -> CodecEngine:
    """The engine of a stage. `load` makes the network, a CodecNetwork in float32, of the checkpoint's name and the
    models folder."""
    options = read_engine_options(context.options, StatefulCodecOptions, context.stage)
    if options.cuda_graph_windows and context.device != "cuda":
        raise OptionsError(f"stage '{context.stage}': cuda_graph_windows needs device cuda, this is {context.device}")
    network = load(options.model, context.models_dir).eval().to(context.device, getattr(torch, options.dtype))
    decoder = StreamingCodec(network, context.device)
    decoder.capture(options.cuda_graph_windows, options.chunks.chunk_frames)
    return CodecEngine(context.stage, decoder, options.chunks)


def tensors_of(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors `prefix…`, named without it, without reading the rest; raises OptionsError for none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({file for name, file in file_of.items() if name.startswith(prefix)})
    else:
        files = ["model.safetensors"]
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
            weights |= {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}
    if not weights:
        raise OptionsError(f"{folder} holds no tensors '{prefix}…'")
    return weights
