# SPDX-License-Identifier: Apache-2.0
"""The talker as a vLLM model: an MoE decoder over given rows, a codec head and the predictor of residual codes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration as CodePredictor,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerResizeMLP as Projection

from triton_omni.backends.ar.blocks import (
    AutoWeightsLoader,
    MoeDecoder,
    SupportsMRoPE,
    SupportsPP,
    WeightsMapper,
    maybe_prefix,
)

ARCHITECTURE = "TritonOmniQwen3Talker"
SPECIAL_CODES = 1024  # the last ids of the talker's vocabulary are never sampled, except the end of speech
RESIDUAL_TOP_K, RESIDUAL_TOP_P = 50, 0.8  # as transformers samples residual codes


def talker_config(config: Any) -> Any:
    """The talker's own config out of the checkpoint's, with the few facts it needs of the others."""
    found = getattr(config, "talker_config", None)
    if found is None:  # vLLM first tries an override on an empty config
        return config
    found.architectures = [ARCHITECTURE]
    found.model_type = "qwen3_omni_moe_talker"
    found.text_vocab_size = config.thinker_config.text_config.vocab_size
    found.audio_n_window = config.thinker_config.audio_config.n_window
    for name in ("tts_pad", "tts_bos", "tts_eos", "im_start", "user", "assistant"):
        setattr(found, f"{name}_token_id", getattr(config, f"{name}_token_id"))
    return found


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What a run's prompt is made of: one word per row, codec ids added to the last rows, and media in place of some.

    media_places, media   rows that pictures and sounds take, and the thinker's hidden rows for them, (places, hidden)
    """

    token_ids: list[int]
    codec_ids: list[int]
    media_places: list[int]
    media: np.ndarray | None


class TalkerNetwork(nn.Module, SupportsPP, SupportsMRoPE):
    """Qwen3-Omni's talker, a `Network` of ar/rows.py. It also holds the thinker's word embeddings: text arrives as
    token ids. With several ranks only the decoder and the codec embeddings are spread; the rest is in each whole."""

    banned: torch.Tensor
    """(vocabulary,) bool: codes that are never sampled"""
    mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.model.embed_tokens.": "word_embedding.",
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
        self.word_embedding = nn.Embedding(config.text_vocab_size, config.thinker_hidden_size)
        self.text_projection = Projection(config)
        self.hidden_projection = Projection(config)
        self.code_predictor = CodePredictor._from_config(config.code_predictor_config)
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

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.mapper)

    # --- ours -----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def text_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Words as the talker reads them, (tokens, hidden)."""
        ids = torch.tensor(token_ids, dtype=torch.long, device=self.banned.device)
        return self.text_projection(self.word_embedding(ids))

    @torch.no_grad()
    def prompt_rows(self, prompt: PromptParts) -> torch.Tensor:
        """A prompt as the talker reads it, (positions, hidden)."""
        rows = self.text_rows(prompt.token_ids)
        if prompt.media is not None:
            rows[prompt.media_places] = self.media_rows(torch.from_numpy(prompt.media))
        rows[-len(prompt.codec_ids) :] += self.codec_rows(prompt.codec_ids)
        return rows

    @torch.no_grad()
    def media_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The thinker's hidden rows of media positions as the talker reads them, (positions, hidden)."""
        return self.hidden_projection(hidden.to(self.banned.device, self.codec_head.weight.dtype))

    @torch.no_grad()
    def codec_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Codec ids as input rows, (tokens, hidden)."""
        return self.model.embed_input_ids(torch.tensor(token_ids, dtype=torch.long, device=self.banned.device))

    @torch.no_grad()
    def predict(
        self, hidden: torch.Tensor, tokens: torch.Tensor, generators: Sequence[torch.Generator | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual codes of the frames that `tokens` begin; see triton_omni.backends.ar.rows.Network."""
        predictor = self.code_predictor
        cache = DynamicCache(config=predictor.config)
        first = self.model.embed_input_ids(tokens)
        rows = torch.stack([hidden, first], 1)
        frame, total = [tokens], first
        for book in range(self.config.num_code_groups - 1):
            out = predictor.model(inputs_embeds=rows, past_key_values=cache, use_cache=True)
            codes = choose(predictor.lm_head[book](out.last_hidden_state[:, -1]), generators)
            row = predictor.model.codec_embedding[book](codes)
            frame.append(codes)
            total = total + row
            rows = row[:, None]
        return torch.stack(frame, 1), total


def choose(logits: torch.Tensor, generators: Sequence[torch.Generator | None]) -> torch.Tensor:
    """One code per row: the best one where there is no generator, else a drawn one, (runs,) int64."""
    best = logits.argmax(-1)
    for place, generator in enumerate(generators):
        if generator is not None:
            best[place] = torch.multinomial(residual_chances(logits[place]), 1, generator=generator)[0]
    return best


def residual_chances(logits: torch.Tensor) -> torch.Tensor:
    """Probability of every code, (codes,): the best RESIDUAL_TOP_K, of those the first RESIDUAL_TOP_P of the mass."""
    values, codes = logits.float().topk(min(RESIDUAL_TOP_K, logits.shape[-1]))
    chances = values.softmax(-1)
    before = chances.cumsum(-1) - chances
    kept = chances.masked_fill(before >= RESIDUAL_TOP_P, 0.0)
    return torch.zeros_like(logits, dtype=torch.float32).scatter(0, codes, kept / kept.sum())
