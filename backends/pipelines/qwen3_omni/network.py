# SPDX-License-Identifier: Apache-2.0
"""The talker as a vLLM model: an MoE decoder over input rows, a codec head and the predictor of residual codes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerResizeMLP as Projection

from triton_omni.backends.ar.blocks import (
    AutoWeightsLoader,
    MoeDecoder,
    SupportsMRoPE,
    SupportsPP,
    WeightsMapper,
    maybe_prefix,
)
from triton_omni.backends.ar.code_predictor import CodePredictor, ResidualSampling
from triton_omni.backends.ar.rows import Draws
from triton_omni.backends.core.engine import OptionsError

ARCHITECTURE = "TritonOmniQwen3Talker"
WEIGHTS = ("talker.", "thinker.model.embed_tokens.")
"""Prefixes of the checkpoint's tensors that the talker loads."""
SPECIAL_CODES = 1024  # the last ids of the talker's vocabulary are never sampled, except the end of speech
RESIDUAL_SAMPLING = ResidualSampling(top_k=50, top_p=0.8)
"""As transformers' talker samples residual codes (Qwen3OmniMoeTalkerForConditionalGeneration)."""


def talker_config(config: Any) -> Any:
    """The talker's own config out of the checkpoint's, with the few values it needs of the others."""
    talker = getattr(config, "talker_config", None)
    if talker is None:  # vLLM first tries an override on an empty config
        return config
    if getattr(config, "quantization_config", None) is not None:
        raise OptionsError("the talker runs unquantized checkpoints only; this one has a quantization_config")
    talker.architectures = [ARCHITECTURE]
    talker.model_type = "qwen3_omni_moe_talker"
    talker.text_vocab_size = config.thinker_config.text_config.vocab_size
    talker.audio_n_window = config.thinker_config.audio_config.n_window
    # transformers always interleaves the talker's M-RoPE sections; vLLM reads this key, the checkpoint lacks it
    talker.text_config.rope_parameters["mrope_interleaved"] = True
    for name in ("tts_pad", "tts_bos", "tts_eos", "im_start", "user", "assistant"):
        setattr(talker, f"{name}_token_id", getattr(config, f"{name}_token_id"))
    return talker


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What a run's prompt is made of: one text token per row, codec ids added to the last rows, media instead of some.

    media_positions  rows that images, audio and video take
    media            the thinker's hidden rows for them, (media positions, hidden), on any device
    """

    token_ids: list[int]
    codec_ids: list[int]
    media_positions: list[int]
    media: torch.Tensor | None

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Pickled for other ranks only: rows go through host memory, as a rank's GPU is not the sender's."""
        media = None if self.media is None else self.media.cpu()
        return PromptParts, (self.token_ids, self.codec_ids, self.media_positions, media)


class TalkerNetwork(nn.Module, SupportsPP, SupportsMRoPE):
    """Qwen3-Omni's talker, a `Network` of ar/rows.py. It also holds the thinker's token embeddings: text arrives as
    token ids. With several ranks the decoder and the codec embeddings are sharded; each rank has all of the rest."""

    banned: torch.Tensor
    """(vocabulary,) bool: codes that are never sampled"""
    mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.model.embed_tokens.": "text_embedding.",
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.model.": "model.",
            "talker.": "",
            "thinker.": None,
            "code2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        text = config.text_config
        self.config = config
        self.pad_text: int = config.tts_pad_token_id
        self.model = MoeDecoder(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.codec_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.thinker_hidden_size)
        self.text_projection = Projection(config)
        self.hidden_projection = Projection(config)
        max_runs: int = vllm_config.scheduler_config.max_num_seqs
        self.code_predictor = CodePredictor(config.code_predictor_config, text.hidden_size, max_runs, RESIDUAL_SAMPLING)
        banned = torch.arange(text.vocab_size) >= text.vocab_size - SPECIAL_CODES
        banned[config.codec_eos_token_id] = False
        self.register_buffer("banned", banned, persistent=False)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    # --- vLLM's side ----------------------------------------------------------------------------------------------
    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Any) -> tuple[torch.Tensor, int]:
        return torch.arange(len(input_tokens)).expand(3, -1).clone(), 0

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **unused: Any,
    ) -> Any:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.codec_head(hidden_states).masked_fill(self.banned, float("-inf"))

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """vLLM's loader does not open a file of which all tensors are unused: the talker reads 9 of 70 GB."""
        return not name.startswith(WEIGHTS)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.mapper)

    # --- ours -----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def text_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Text tokens as input rows, (tokens, hidden)."""
        ids = torch.tensor(token_ids, dtype=torch.long, device=self.banned.device)
        return self.text_projection(self.text_embedding(ids))

    @torch.no_grad()
    def prompt_rows(self, prompt: PromptParts) -> torch.Tensor:
        """A prompt as input rows, (positions, hidden)."""
        rows = self.text_rows(prompt.token_ids)
        if prompt.media is not None:
            rows[prompt.media_positions] = self.media_rows(prompt.media)
        rows[-len(prompt.codec_ids) :] += self.codec_rows(prompt.codec_ids)
        return rows

    @torch.no_grad()
    def media_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The thinker's hidden rows of media positions as input rows, (positions, hidden)."""
        return self.hidden_projection(hidden.to(self.banned.device, self.codec_head.weight.dtype))

    @torch.no_grad()
    def codec_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Codec ids as input rows, (tokens, hidden)."""
        return self.model.embed_input_ids(torch.tensor(token_ids, dtype=torch.long, device=self.banned.device))

    def predict(self, hidden: torch.Tensor, tokens: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual codes of the frames that `tokens` begin; see triton_omni.backends.ar.rows.Network."""
        with torch.no_grad():
            first = self.model.embed_input_ids(tokens)
        return self.code_predictor.frame(hidden, first, tokens, draws)
