# SPDX-License-Identifier: Apache-2.0
"""The predictor of residual codes: a small transformer that completes a frame whose first code is known.

All runs of a step are one batch. The key-value cache holds one frame, is allocated once and written in place; a frame
is a fixed sequence of passes without host synchronization, so that a CUDA graph for each of a few batch sizes captures
it whole (not run on a GPU). At load captured frames are compared with eager ones.

Codes are drawn without generators: the noise of a code is a hash (splitmix64) of the run's seed, the frame's number,
the book and the code. It has no state, so a run draws the same codes alone, in a batch and after a preemption, as far
as its logits are the same. In float32 they are, to rounding; in bfloat16 the batch size may change a code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from triton_omni.backends.ar.rows import Draws
from triton_omni.backends.cuda_graphs import NotCapturedError, Recorder, batch_sizes, record_cuda_graph

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger("triton_omni.ar")

GOLDEN = -0x61C8864680B583EB
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), as int64."""
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}

COMPARED_BATCHES = 8
"""Batches of random inputs on which captured and eager frames of each size are compared."""
EQUAL_FRAMES = {torch.float32: 1.0, torch.float16: 0.75, torch.bfloat16: 0.75}
"""Smallest share of equal frames. In half precision rounding may change a code, and then those behind it; a graph that
reads other inputs makes other frames nearly always."""


class ResidualSampling(NamedTuple):
    """Residual codes are drawn at `temperature` from the best `top_k` codes, of those the first `top_p` of the mass."""

    top_k: int
    top_p: float
    temperature: float = 1.0


class DecoderLayer(nn.Module):
    """One layer's weights, by transformers' names; query, key and value are fused, and gate and up."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        size: int = config.head_dim
        self.qkv = _weight((heads + 2 * kv_heads) * size, hidden)
        self.o_proj = _weight(hidden, heads * size)
        self.gate_up = _weight(2 * config.intermediate_size, hidden)
        self.down_proj = _weight(hidden, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = _weight(hidden), _weight(hidden)
        self.q_norm, self.k_norm = _weight(size), _weight(size)
        self.rows = {
            "q_proj": slice(0, heads * size),
            "k_proj": slice(heads * size, (heads + kv_heads) * size),
            "v_proj": slice((heads + kv_heads) * size, None),
            "gate_proj": slice(0, config.intermediate_size),
            "up_proj": slice(config.intermediate_size, None),
        }
        """Where the checkpoint's matrices lie in the fused ones."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one of the checkpoint's matrices or vectors, by its transformers name."""
        target: torch.Tensor = getattr(self, _FUSED.get(name, name))
        target[self.rows.get(name, slice(None))].copy_(tensor)


class CodePredictor(nn.Module):
    """Residual codes of up to `max_runs` frames at once. Parameters load from transformers' names."""

    def __init__(self, config: PreTrainedConfig, input_size: int, max_runs: int, sampling: ResidualSampling) -> None:
        """`config` is transformers' code predictor config; `input_size` the width of the talker's rows and of the
        embeddings: where it is another than the predictor's, a projection stands between."""
        super().__init__()
        self.config = config
        self.sampling = sampling
        self.books: int = config.num_code_groups - 1
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = _weight(config.hidden_size)
        self.heads = _weight(self.books, config.vocab_size, config.hidden_size)
        self.embeddings = _weight(self.books, config.vocab_size, input_size)
        self.projection = self.projection_bias = None
        if input_size != config.hidden_size:
            self.projection, self.projection_bias = _weight(config.hidden_size, input_size), _weight(config.hidden_size)
        cache = (config.num_hidden_layers, 2, max_runs, config.num_key_value_heads, self.books + 1, config.head_dim)
        self.register_buffer("cache", torch.zeros(cache), persistent=False)
        self.register_buffer("rotation", torch.empty(0), persistent=False)
        self.cache: torch.Tensor
        self.rotation: torch.Tensor
        """(layers, 2, positions, heads, head size): see `_rotations`."""
        self._graphs: list[FrameGraph] = []

    # --- weights ------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all parameters from transformers' names; raises ValueError for an unknown or a missing name."""
        expected = set(self.checkpoint_names())
        for name, tensor in weights:
            if name not in expected:
                raise ValueError(f"the code predictor has no tensor '{name}'")
            expected.remove(name)
            self._load(name.split("."), tensor)
        if expected:
            raise ValueError(f"the code predictor lacks {len(expected)} tensors: {min(expected)} …")
        self.rotation = self._rotations()
        return {name for name, _ in self.named_parameters()}

    def checkpoint_names(self) -> Iterable[str]:
        """Names of all tensors as transformers saves them."""
        for index in range(len(self.layers)):
            layer = f"model.layers.{index}"
            for matrix in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
                yield f"{layer}.self_attn.{matrix}.weight"
            yield from (f"{layer}.mlp.{matrix}.weight" for matrix in ("gate_proj", "up_proj", "down_proj"))
            yield from (f"{layer}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm"))
        yield "model.norm.weight"
        if self.projection is not None:
            yield from ("small_to_mtp_projection.weight", "small_to_mtp_projection.bias")
        for book in range(self.books):
            yield f"lm_head.{book}.weight"
            yield f"model.codec_embedding.{book}.weight"

    def _load(self, name: list[str], tensor: torch.Tensor) -> None:
        match name:
            case ["model", "norm", _]:
                self.norm.copy_(tensor)
            case ["small_to_mtp_projection", kind]:
                target = self.projection if kind == "weight" else self.projection_bias
                assert target is not None, "its name is expected where there is one"
                target.copy_(tensor)
            case ["lm_head", book, _]:
                self.heads[int(book)].copy_(tensor)
            case ["model", "codec_embedding", book, _]:
                self.embeddings[int(book)].copy_(tensor)
            case _:
                layer = self.layers[int(name[2])]
                assert isinstance(layer, DecoderLayer)
                layer.load(name[-2], tensor)

    def _rotations(self) -> torch.Tensor:
        """Rotary embedding and the weights of the query and key norms, as two factors: with x the normalized rows,
        rotated = x * factor 0 + roll(x, half) * factor 1."""
        config = self.config
        theta: float = config.rope_parameters["rope_theta"]
        size, half = config.head_dim, config.head_dim // 2
        frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.outer(torch.arange(self.books + 1, dtype=torch.float32), frequencies).repeat(1, 2)
        sign = torch.ones(size)
        sign[:half] = -1.0
        factors: list[torch.Tensor] = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            norms = [layer.q_norm] * config.num_attention_heads + [layer.k_norm] * config.num_key_value_heads
            weights = torch.stack(norms).float().cpu()
            cos = angles.cos()[:, None] * weights
            sin = angles.sin()[:, None] * weights.roll(half, -1) * sign
            factors.append(torch.stack([cos, sin]))
        return torch.stack(factors).to(self.norm.device, self.norm.dtype)

    # --- frames -------------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def frame(
        self, hidden: torch.Tensor, first: torch.Tensor, tokens: torch.Tensor, draws: Draws
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Complete one frame for each run.

        hidden, first (runs, hidden): the talker's last hidden rows and the embedding of its `tokens` (runs,). Returns
        codes (runs, books + 1) int64 with `tokens` in front, and their summed embedding (runs, hidden); the next call
        may overwrite both.
        """
        inputs = (hidden, first, tokens, draws.seeds, draws.frames, draws.greedy)
        graph = next((graph for graph in self._graphs if graph.size >= len(tokens)), None)
        return self._eager(*inputs) if graph is None else graph.run(inputs)

    @torch.inference_mode()
    def capture(self, record: Recorder = record_cuda_graph) -> None:
        """From now on frames are computed by graphs, one for each of a few batch sizes. If one cannot be recorded or
        computes other frames than eager steps, log one warning and use none. `load_weights` comes before."""
        largest, width = self.cache.shape[2], self.embeddings.shape[-1]
        try:
            graphs = [FrameGraph(self, size, width, record) for size in batch_sizes(largest)]
            for graph in graphs:
                equal = self._equal_frames(graph)
                if equal < EQUAL_FRAMES[self.norm.dtype]:
                    raise NotCapturedError(
                        f"captured frames of {graph.size} runs differ from eager ones ({equal:.0%} are equal)"
                    )
        except RuntimeError as error:
            log.warning("%s: the code predictor runs without CUDA graphs", error)
            return
        self._graphs = graphs

    def _equal_frames(self, graph: FrameGraph) -> float:
        """Share of frames that `graph` and an eager step compute alike, of random inputs."""
        generator = torch.Generator().manual_seed(graph.size)
        device, dtype, equal = self.norm.device, self.norm.dtype, 0
        for batch in range(COMPARED_BATCHES):
            rows = torch.randn(2, graph.size, self.embeddings.shape[-1], generator=generator).to(device, dtype)
            tokens, seeds = torch.randint(0, self.config.vocab_size, (2, graph.size), generator=generator).to(device)
            inputs = (rows[0], rows[1], tokens, seeds, torch.full_like(seeds, batch), seeds % 2 == 0)
            captured, eager = graph.run(inputs)[0].clone(), self._eager(*inputs)[0]
            equal += int((captured == eager).all(1).sum())
        return equal / (COMPARED_BATCHES * graph.size)

    def _eager(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        tokens: torch.Tensor,
        seeds: torch.Tensor,
        frames: torch.Tensor,
        greedy: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `frame` returns, one kernel after the other."""
        frame_keys = mix(seeds ^ mix(frames * GOLDEN))
        codes, total = [tokens], first
        rows, position = self._projected(torch.stack([hidden, first], 1)), 0
        for book in range(self.books):
            last = self._forward(rows, position)
            position += rows.shape[1]
            logits = F.linear(last, self.heads[book])
            codes.append(draw(logits, mix(frame_keys + book), greedy, self.sampling))
            embedding = F.embedding(codes[-1], self.embeddings[book])
            total = total + embedding
            rows = self._projected(embedding[:, None])
        return torch.stack(codes, 1), total

    @torch.no_grad()
    def residual_rows(self, codes: torch.Tensor) -> torch.Tensor:
        """Summed embeddings (frames, input size) of residual codes (frames, books) int64."""
        return torch.stack([F.embedding(codes[:, book], self.embeddings[book]) for book in range(self.books)]).sum(0)

    def _projected(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.projection is None else F.linear(rows, self.projection, self.projection_bias)

    def _forward(self, rows: torch.Tensor, position: int) -> torch.Tensor:
        """Rows (runs, n, hidden) at `position` and on → the last one's final hidden row (runs, hidden)."""
        config = self.config
        runs, count, hidden = rows.shape
        heads, kv_heads, size, eps = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps,
        )  # fmt: skip
        end = position + count
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            normed = F.rms_norm(rows, (hidden,), layer.input_layernorm, eps)
            qkv = F.linear(normed, layer.qkv).view(runs, count, heads + 2 * kv_heads, size)
            unit = F.rms_norm(qkv[:, :, : heads + kv_heads], (size,), None, eps)
            cos, sin = self.rotation[index, 0, position:end], self.rotation[index, 1, position:end]
            turned = torch.addcmul(unit * cos, unit.roll(size // 2, -1), sin).transpose(1, 2)
            keys, values = self.cache[index, 0, :runs], self.cache[index, 1, :runs]
            keys[:, :, position:end] = turned[:, heads:]
            values[:, :, position:end] = qkv[:, :, heads + kv_heads :].transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                turned[:, :heads], keys[:, :, :end], values[:, :, :end], is_causal=count > 1, enable_gqa=True
            )
            rows = rows + F.linear(attended.transpose(1, 2).reshape(runs, count, heads * size), layer.o_proj)
            normed = F.rms_norm(rows, (hidden,), layer.post_attention_layernorm, eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
            rows = rows + F.linear(F.silu(gate) * up, layer.down_proj)
        return F.rms_norm(rows[:, -1], (hidden,), self.norm, eps)


class FrameGraph:
    """Frames of `size` runs, recorded once; fewer runs are filled up with rows of earlier steps.

    Its recorder keeps `_eager`'s order of arguments: hidden, first, tokens, seeds, frames, greedy.
    """

    def __init__(self, predictor: CodePredictor, size: int, width: int, record: Recorder) -> None:
        """`width` is that of the talker's rows."""
        device, dtype = predictor.norm.device, predictor.norm.dtype
        self.size = size
        rows = (torch.zeros(size, width, dtype=dtype, device=device) for _ in range(2))
        numbers = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(3))
        self._inputs = (*rows, *numbers, torch.zeros(size, dtype=torch.bool, device=device))
        self._replay, (self._codes, self._sums) = record(lambda: predictor._eager(*self._inputs))

    def run(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """What `CodePredictor.frame` returns, for at most `size` runs; the next run overwrites it."""
        count = len(inputs[0])
        for static, given in zip(self._inputs, inputs, strict=True):
            static[:count].copy_(given)
        self._replay()
        return self._codes[:count], self._sums[:count]


def draw(logits: torch.Tensor, keys: torch.Tensor, greedy: torch.Tensor, sampling: ResidualSampling) -> torch.Tensor:
    """One code per row (runs,): the best where `greedy`, else drawn by an exponential race over the kept codes.

    logits (runs, codes), keys (runs,) int64: one hash per row.
    """
    values, codes = logits.float().topk(min(sampling.top_k, logits.shape[-1]))
    values = values / sampling.temperature
    noise = -uniform(keys, codes).log()
    scores = torch.where(greedy[:, None], values, kept(values, sampling.top_p) - noise.log())
    return codes.gather(1, scores.argmax(-1, keepdim=True))[:, 0]


def kept(values: torch.Tensor, top_p: float) -> torch.Tensor:
    """Logits (runs, codes), best first, with those behind the first `top_p` of the mass at -inf."""
    if top_p >= 1.0:
        return values
    probabilities = values.softmax(-1)
    return values.masked_fill(probabilities.cumsum(-1) - probabilities >= top_p, float("-inf"))


def uniform(keys: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in (0, 1), float32 (runs, codes), a hash of each row's key (runs,) and each code."""
    bits = mix(keys[:, None] + (codes + 1) * GOLDEN)
    return (((bits >> 40) & 0xFFFFFF).float() + 0.5) * 2.0**-24


def mix(z: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64. torch multiplies modulo 2**64; its >> is arithmetic, hence the masks."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX[0]
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX[1]
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
