# SPDX-License-Identifier: Apache-2.0
"""A tiny random Qwen3-ForcedAligner in the published file layout (thinker.*), fp32 and seeded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.tiny_tts import tokenizer_files

SPECIAL = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|audio_start|>": 151669,
    "<|audio_end|>": 151670, "<|audio_pad|>": 151676, "<timestamp>": 151705,
}  # fmt: skip
CLASSES = 5000
PUBLISHED = (
    ("model.audio_tower.", "thinker.audio_tower."),
    ("model.multi_modal_projector.linear_1.", "thinker.audio_tower.proj1."),
    ("model.multi_modal_projector.linear_2.", "thinker.audio_tower.proj2."),
    ("model.language_model.", "thinker.model."),
    ("score.", "thinker.lm_head."),
)
"""transformers' names → published ones."""


def tiny_aligner(folder: Path) -> Any:
    """Write the checkpoint; returns the model that was saved."""
    import torch
    from safetensors.torch import save_file
    from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASRForTokenClassification

    from triton_omni.backends.pipelines.qwen3_tts.aligner import aligner_config

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_files(folder, SPECIAL)
    facts = config()
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    model: Any = Qwen3ASRForTokenClassification(aligner_config(facts)).float().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise * (0.5 if "embed" in name else weight[0].numel() ** -0.5))
            else:
                weight.copy_(1 + 0.1 * noise if name.endswith("weight") else 0.05 * noise)
    tensors = {_published(name): tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def config() -> dict[str, Any]:
    audio = {
        "num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32,
        "n_window": 50, "n_window_infer": 800, "output_dim": 64, "downsample_hidden_size": 16,
        "max_source_positions": 1500, "conv_chunksize": 500, "activation_function": "gelu", "num_hidden_layers": 2,
    }  # fmt: skip
    text = {
        "vocab_size": 152064, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": False, "hidden_act": "silu",
        "rope_scaling": {
            "rope_type": "default", "type": "default", "mrope_section": [8, 4, 4], "interleaved": True,
            "mrope_interleaved": True,
        },
    }  # fmt: skip
    return {
        "architectures": ["Qwen3ASRForConditionalGeneration"], "model_type": "qwen3_asr",
        "timestamp_token_id": 151705, "timestamp_segment_time": 80, "support_languages": ["Chinese", "English"],
        "thinker_config": {
            "model_type": "qwen3_forced_aligner", "audio_config": audio, "text_config": text,
            "classify_num": CLASSES, "audio_token_id": 151676, "audio_start_token_id": 151669,
            "audio_end_token_id": 151670, "dtype": "float32",
        },
    }  # fmt: skip


def _published(name: str) -> str:
    own, published = next(pair for pair in PUBLISHED if name.startswith(pair[0]))
    return published + name.removeprefix(own)
