# SPDX-License-Identifier: Apache-2.0
"""The talker as a vLLM model: a Qwen3 decoder over input rows, a codec head and the predictor of residual codes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, Qwen3Config

from triton_omni.backends.ar.blocks import AutoWeightsLoader, Decoder, SupportsPP, WeightsMapper, maybe_prefix
from triton_omni.backends.ar.code_predictor import CodePredictor, ResidualSampling
from triton_omni.backends.ar.rows import Draws
from triton_omni.backends.pipelines.qwen3_tts.checkpoint import MODEL_TYPE, DecoderFacts, TtsFacts, read_facts
from triton_omni.backends.pipelines.qwen3_tts.prompts import TtsPrompt

ARCHITECTURE = "TritonOmniQwen3TtsTalker"
SPECIAL_CODES = 1024  # the last ids of the talker's vocabulary are never sampled, except the end of speech
RESIDUAL_SAMPLING = ResidualSampling(top_k=50, top_p=1.0, temperature=0.9)
"""As qwen-tts 0.1.1 samples residual codes."""


class Qwen3TtsConfig(Qwen3Config):
    """What vLLM reads of a checkpoint whose kind transformers does not know: the talker is a Qwen3 decoder."""

    model_type = MODEL_TYPE
    folder: str = ""
    """Of the checkpoint."""


AutoConfig.register(MODEL_TYPE, Qwen3TtsConfig, exist_ok=True)


def decoder_config(facts: DecoderFacts) -> Qwen3Config:
    """transformers' config of a decoder. The talker's M-RoPE has three equal positions, which is plain RoPE."""
    values = {name: getattr(facts, name) for name in DecoderFacts.__struct_fields__}
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    return Qwen3TtsConfig(**values, rope_parameters=rope, tie_word_embeddings=False)


def talker_config(folder: Path, config: Any) -> Any:
    """The talker's config in place of the checkpoint's: vLLM's `hf_overrides`, with `folder` bound."""
    if config.model_type != MODEL_TYPE:  # vLLM first tries an override on an empty config
        return config
    talker = decoder_config(read_facts(folder).talker_config)
    talker.architectures = [ARCHITECTURE]
    talker.folder = str(folder)
    return talker


class TtsTalkerNetwork(nn.Module, SupportsPP):
    """Qwen3-TTS's talker, a `Network` of ar/rows.py. With several ranks the decoder and the codec embeddings are
    sharded; each rank has all of the rest."""

    banned: torch.Tensor
    """(vocabulary,) bool: codes that are never sampled"""
    mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.text_embedding.": "text_embedding.",
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.model.": "model.",
            "talker.": "",
            "speaker_encoder.": None,
        }
    )

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config: Qwen3TtsConfig = vllm_config.model_config.hf_config
        facts: TtsFacts = read_facts(Path(self.config.folder))
        talker = facts.talker_config
        self.pad_text = facts.tts_pad_token_id
        self.model = Decoder(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.codec_head = nn.Linear(talker.hidden_size, talker.vocab_size, bias=False)
        self.text_embedding = nn.Embedding(talker.text_vocab_size, talker.text_hidden_size)
        self.text_projection = TextProjection(talker.text_hidden_size, talker.hidden_size)
        predictor = decoder_config(talker.code_predictor_config)
        max_runs: int = vllm_config.scheduler_config.max_num_seqs
        self.code_predictor = CodePredictor(predictor, talker.hidden_size, max_runs, RESIDUAL_SAMPLING)
        banned = torch.arange(talker.vocab_size) >= talker.vocab_size - SPECIAL_CODES
        banned[talker.codec_eos_token_id] = False
        self.register_buffer("banned", banned, persistent=False)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    # --- vLLM's side ----------------------------------------------------------------------------------------------
    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

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
        """Text tokens as input rows, (tokens, hidden)."""
        ids = torch.tensor(token_ids, dtype=torch.long, device=self.banned.device)
        return self.text_projection(self.text_embedding(ids))

    @torch.no_grad()
    def prompt_rows(self, prompt: TtsPrompt) -> torch.Tensor:
        """A prompt as input rows, (positions, hidden)."""
        rows = self.text_rows(prompt.token_ids)
        places, ids = zip(*prompt.codec_ids, strict=True)
        rows[list(places)] += self._codec_rows(torch.tensor(ids, device=rows.device))
        if prompt.vector is not None:
            rows[prompt.vector_row] += torch.from_numpy(prompt.vector).to(rows)
        if prompt.frames is not None:
            codes = torch.from_numpy(prompt.frames).to(rows.device, torch.long)
            total = self._codec_rows(codes[:, 0]) + self.code_predictor.residual_rows(codes[:, 1:])
            rows[prompt.frames_row : prompt.frames_row + len(codes)] += total
        return rows

    def predict(self, hidden: torch.Tensor, tokens: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual codes of the frames that `tokens` begin; see triton_omni.backends.ar.rows.Network."""
        with torch.no_grad():
            first = self._codec_rows(tokens)
        return self.code_predictor.frame(hidden, first, tokens, draws)

    def _codec_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Codec ids (n,) as input rows (n, hidden)."""
        return self.model.embed_input_ids(ids)


class TextProjection(nn.Module):
    """Text embeddings → the talker's width, by the checkpoint's names."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(width, width)
        self.linear_fc2 = nn.Linear(width, hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(nn.functional.silu(self.linear_fc1(rows)))
