# SPDX-License-Identifier: Apache-2.0
"""Stage `code2wav`: frames of codes to audio by the decoder of the 12 Hz codec, which carries its state between chunks.

The decoder is of the family of Qwen3-Omni's and made of transformers' blocks for that one. In front of its transformer
it has codebooks and a convolution; its transposed convolutions are cut at the right only.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import msgspec
import torch
from torch import nn
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

from triton_omni.backends.codec.engine import CodecEngine
from triton_omni.backends.codec.streaming import streaming_engine, tensors_of
from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_tts.checkpoint import Size, speech_folder

PREFIX = "decoder."
LEAST_USAGE = 1e-5  # of a codebook's entry, as the codec's EuclideanCodebook has it


class CodecFacts(msgspec.Struct, frozen=True):
    """`decoder_config` of the codec's config.json."""

    codebook_size: Size
    codebook_dim: Size
    hidden_size: Size
    latent_dim: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    num_quantizers: Size
    sliding_window: Size
    decoder_dim: Size
    upsample_rates: tuple[Size, ...]
    upsampling_ratios: tuple[Size, ...]
    head_dim: Size | None = None
    max_position_embeddings: Size = 8000
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    attention_bias: bool = False
    layer_scale_initial_scale: float = 0.01


class SpeechConfig(msgspec.Struct, frozen=True):
    """The codec's config.json, as far as it is read here."""

    decoder_config: CodecFacts


def make_code2wav(context: EngineContext) -> CodecEngine:
    """The engine of stage `code2wav`."""
    return streaming_engine(context, load)


def load(model: str, models_dir: str) -> TtsCodec:
    """The decoder of a checkpoint, float32 on the CPU."""
    folder = speech_folder(model, models_dir)
    try:
        facts = msgspec.json.decode((folder / "config.json").read_bytes(), type=SpeechConfig).decoder_config
    except msgspec.DecodeError as error:
        raise OptionsError(f"{folder / 'config.json'} cannot be read: {error}") from None
    network = TtsCodec(facts)
    network.load_published(tensors_of(folder, PREFIX))
    return network


class TtsCodec(nn.Module):
    """triton_omni.backends.codec.streaming.CodecNetwork: codes (runs, books, frames) → samples (runs, 1, samples)."""

    def __init__(self, facts: CodecFacts) -> None:
        super().__init__()
        self.config = config = transformer_config(facts)
        self.total_upsample = prod((*facts.upsample_rates, *facts.upsampling_ratios))
        latent = facts.latent_dim
        self.codebooks = nn.Parameter(torch.empty(facts.num_quantizers, facts.codebook_size, facts.codebook_dim))
        """Entries, through the output projection of their group."""
        self.pre_conv = modeling.Qwen3OmniMoeCausalConvNet(facts.codebook_dim, latent, 3)
        self.input_proj = nn.Linear(latent, facts.hidden_size)
        self.pre_transformer: Any = modeling.Qwen3OmniMoeCode2WavTransformerModel._from_config(config)
        self.output_proj = nn.Linear(facts.hidden_size, latent)
        upsample = (
            nn.ModuleList(
                (modeling.Qwen3OmniMoeCausalTransConvNet(latent, latent, ratio, ratio),
                 modeling.Qwen3OmniMoeConvNeXtBlock(latent))
            )
            for ratio in facts.upsampling_ratios
        )  # fmt: skip
        self.upsample = nn.ModuleList(upsample)
        last = facts.decoder_dim // 2 ** len(facts.upsample_rates)
        self.decoder = nn.ModuleList(
            (
                modeling.Qwen3OmniMoeCausalConvNet(latent, facts.decoder_dim, 7),
                *(modeling.Qwen3OmniMoeCode2WavDecoderBlock(config, i) for i in range(len(facts.upsample_rates))),
                modeling.Qwen3OmniMoeSnakeBeta(last),
                modeling.Qwen3OmniMoeCausalConvNet(last, 1, 7),
            )
        )
        for module in self.modules():
            if isinstance(module, modeling.Qwen3OmniMoeCausalTransConvNet):
                module.left_pad = 0

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        embedded = [nn.functional.embedding(codes[:, i], book) for i, book in enumerate(self.codebooks)]
        hidden = self.pre_conv(torch.stack(embedded).sum(0).transpose(1, 2)).transpose(1, 2)
        hidden = self.pre_transformer(inputs_embeds=self.input_proj(hidden)).last_hidden_state
        hidden = self.output_proj(hidden).transpose(1, 2)
        for blocks in self.upsample:
            for block in blocks:  # pyright: ignore[reportGeneralTypeIssues]
                hidden = block(hidden)
        for block in self.decoder:
            hidden = block(hidden)
        return hidden.clamp(-1, 1)

    def load_published(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load from the checkpoint's names; raises OptionsError for missing or unknown ones."""
        own: dict[str, torch.Tensor] = {}
        for name, tensor in weights.items():
            group, _, rest = name.partition(".")
            if group == "pre_transformer" and rest.startswith(("input_proj.", "output_proj.")):
                own[rest] = tensor
            elif group != "quantizer":
                own[name] = tensor
        try:
            own["codebooks"] = torch.stack([_codebook(weights, i) for i in range(len(self.codebooks))])
            self.load_state_dict(own)
        except (KeyError, RuntimeError) as error:
            raise OptionsError(f"the codec's tensors do not fit its config: {error}") from None


def _codebook(weights: Mapping[str, torch.Tensor], index: int) -> torch.Tensor:
    """Entries (codes, width) of a book: means of what was assigned to them, projected."""
    group, layer = ("rvq_first", 0) if index == 0 else ("rvq_rest", index - 1)
    book = f"quantizer.{group}.vq.layers.{layer}._codebook"
    usage = weights[f"{book}.cluster_usage"].clamp(min=LEAST_USAGE)
    entries = weights[f"{book}.embedding_sum"] / usage[:, None]
    return nn.functional.linear(entries, weights[f"quantizer.{group}.output_proj.weight"][:, :, 0])


def transformer_config(facts: CodecFacts) -> Qwen3OmniMoeCode2WavConfig:
    """transformers' config of the blocks."""
    values = msgspec.structs.asdict(facts)
    head_dim = values.pop("head_dim") or facts.hidden_size // facts.num_attention_heads
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    own = {"head_dim": head_dim, "codebook_dim": values.pop("codebook_dim"), "latent_dim": values.pop("latent_dim")}
    return Qwen3OmniMoeCode2WavConfig(**values, rope_parameters=rope, **own)
