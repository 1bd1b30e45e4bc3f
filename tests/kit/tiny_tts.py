# SPDX-License-Identifier: Apache-2.0
"""A tiny random checkpoint of Qwen3-TTS (12 Hz) in the published file layout, fp32 and seeded.

Ids, languages, voices, books, strides and the codec's window are the published ones; all widths are small. The tensors
have the published names (tests/reference/test_tts_published.py loads them into qwen-tts itself).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

ROLES = {"assistant": 77091, "user": 872, "system": 8948}
SPECIAL = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|audio_start|>": 151669,
    "<|audio_end|>": 151670, "<tts_pad>": 151671, "<tts_text_bos>": 151672, "<tts_text_eod>": 151673,
    "<tts_text_bos_single>": 151674, "<|audio_pad|>": 151675,
}  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = ["the quick brown fox jumps over the lazy dog. hello world, this is a test of speech and images."] * 50
LANGUAGES = {
    "chinese": 2055, "english": 2050, "german": 2053, "italian": 2070, "portuguese": 2071, "spanish": 2054,
    "japanese": 2058, "korean": 2064, "french": 2061, "russian": 2069, "beijing_dialect": 2074,
    "sichuan_dialect": 2062,
}  # fmt: skip
VOICES = {
    "serena": 3066, "vivian": 3065, "uncle_fu": 3010, "ryan": 3061, "aiden": 2861, "ono_anna": 2873, "sohee": 2864,
    "eric": 2875, "dylan": 2878,
}  # fmt: skip
DIALECTS = dict.fromkeys(VOICES, False) | {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
BOOKS, CODES = 16, 2048
LAST_CONVOLUTION = "decoder.decoder.6.conv.weight"  # halved: peaks of 0.5 are loud and never clipped
FORMAT = {"format": "pt"}


def tiny_tts(folder: Path, kind: str = "custom_voice", size: str = "1b7") -> Path:
    """Write the checkpoint. `kind` is base, custom_voice or voice_design; `size` 1b7 or 0b6, whose predictor needs no
    projection."""
    import torch
    from safetensors.torch import save_file

    (folder / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer_files(folder)
    facts, codec = config(kind, size), codec_config()
    _write(folder / "config.json", facts)
    sampling = {"do_sample": True, "temperature": 0.9, "top_p": 1.0, "top_k": 50}
    subtalker = {f"subtalker_{name.replace('do_', 'do')}": value for name, value in sampling.items()}
    others = {"repetition_penalty": 1.05, "max_new_tokens": 8192}
    _write(folder / "generation_config.json", sampling | subtalker | others)
    feature = {
        "chunk_length_s": None, "feature_extractor_type": "EncodecFeatureExtractor", "feature_size": 1,
        "overlap": None, "padding_side": "right", "padding_value": 0.0, "return_attention_mask": True,
        "sampling_rate": 24000,
    }  # fmt: skip
    _write(folder / "preprocessor_config.json", feature)
    _write(folder / "speech_tokenizer" / "config.json", codec)
    _write(folder / "speech_tokenizer" / "preprocessor_config.json", feature)
    with torch.device("cpu"):
        save_file(_filled(_talker_tensors(facts, kind), 7), folder / "model.safetensors", FORMAT)
        save_file(_filled(_codec_tensors(codec), 11), folder / "speech_tokenizer" / "model.safetensors", FORMAT)
    return folder


# --- files ------------------------------------------------------------------------------------------------------------
def tokenizer_files(folder: Path, special: dict[str, int] = SPECIAL) -> None:
    """Byte-level BPE as Qwen's, with the published ids of special tokens and roles; the vocabulary has gaps."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(alphabet), show_progress=False)
    inner.train_from_iterator([f"{word}\n\n" * 20 for word in ROLES] * 50 + CORPUS, trainer)
    model = json.loads(inner.to_str())["model"]
    vocab = {char: i for i, char in enumerate(_bytes())}  # the published vocabulary begins with them
    free = iter(range(256, 872))
    for word in model["vocab"]:
        if word not in vocab:
            vocab[word] = ROLES.get(word) or next(free)
    _write(folder / "vocab.json", vocab | special)
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer", "model_max_length": 131072, "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>", "bos_token": None, "unk_token": None, "add_prefix_space": False,
            "errors": "replace", "split_special_tokens": False, "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {str(i): plain | {"content": word} for word, i in special.items()},
        },
    )  # fmt: skip


def _bytes() -> list[str]:
    """All bytes as printable characters, in the order of their ids."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in shown] + [chr(256 + k) for k in range(256 - len(shown))]


def config(kind: str, size: str) -> dict[str, Any]:
    """config.json."""
    attention = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 1000000,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0,
        "num_code_groups": BOOKS,
    }  # fmt: skip
    predictor = attention | {
        "model_type": "qwen3_tts_talker_code_predictor", "vocab_size": CODES, "hidden_size": 48,
        "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 65536, "rope_scaling": None,
    }  # fmt: skip
    has_voices = kind == "custom_voice"
    talker = attention | {
        "model_type": "qwen3_tts_talker", "vocab_size": 3072, "hidden_size": 64 if size == "1b7" else 48,
        "intermediate_size": 128, "num_hidden_layers": 3, "max_position_embeddings": 32768,
        "rope_scaling": {"interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default", "type": "default"},
        "text_vocab_size": 151936, "text_hidden_size": 16, "position_id_per_seconds": 13,
        "codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_pad_id": 2148, "codec_think_id": 2154,
        "codec_nothink_id": 2155, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
        "codec_language_id": LANGUAGES, "spk_id": VOICES if has_voices else {},
        "spk_is_dialect": DIALECTS if has_voices else {}, "code_predictor_config": predictor,
    }  # fmt: skip
    facts = {
        "architectures": ["Qwen3TTSForConditionalGeneration"], "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz", "tts_model_size": size, "tts_model_type": kind,
        "assistant_token_id": 77091, "im_start_token_id": 151644, "im_end_token_id": 151645,
        "tts_pad_token_id": 151671, "tts_bos_token_id": 151672, "tts_eos_token_id": 151673, "talker_config": talker,
    }  # fmt: skip
    if kind == "base":
        facts["speaker_encoder_config"] = {
            "mel_dim": 128, "enc_dim": talker["hidden_size"], "enc_channels": [32, 32, 32, 32, 96],
            "enc_kernel_sizes": [5, 3, 3, 3, 1], "enc_dilations": [1, 2, 3, 4, 1], "enc_attention_channels": 16,
            "enc_res2net_scale": 8, "enc_se_channels": 16, "sample_rate": 24000,
        }  # fmt: skip
    return facts


def codec_config() -> dict[str, Any]:
    """speech_tokenizer/config.json."""
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"], "model_type": "qwen3_tts_tokenizer_12hz",
        "input_sample_rate": 24000, "output_sample_rate": 24000, "decode_upsample_rate": 1920,
        "encode_downsample_rate": 1920, "encoder_valid_num_quantizers": BOOKS,
        "decoder_config": {
            "codebook_size": CODES, "codebook_dim": 32, "hidden_size": 32, "latent_dim": 48,
            "max_position_embeddings": 8000, "rope_theta": 10000, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 16, "attention_bias": False, "sliding_window": 72, "intermediate_size": 64,
            "hidden_act": "silu", "layer_scale_initial_scale": 0.01, "rms_norm_eps": 1e-5, "num_hidden_layers": 2,
            "num_quantizers": BOOKS, "num_semantic_quantizers": 1, "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2], "decoder_dim": 64, "attention_dropout": 0.0,
        },
        "encoder_config": {
            "model_type": "mimi", "sampling_rate": 24000, "frame_rate": 12.5, "_frame_rate": 12.5,
            "audio_channels": 1, "hidden_size": 32, "num_filters": 4, "num_residual_layers": 1,
            "upsampling_ratios": [8, 6, 5, 4], "kernel_size": 7, "last_kernel_size": 3, "residual_kernel_size": 3,
            "dilation_growth_rate": 2, "use_causal_conv": True, "pad_mode": "constant", "compress": 2,
            "trim_right_ratio": 1.0, "codebook_size": CODES, "codebook_dim": 16, "num_quantizers": 32,
            "num_semantic_quantizers": 1, "use_conv_shortcut": False, "vector_quantization_hidden_dimension": 16,
            "upsample_groups": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "gelu", "max_position_embeddings": 8000,
            "norm_eps": 1e-5, "use_cache": False, "use_streaming": False, "rope_theta": 10000.0,
            "sliding_window": 250, "attention_dropout": 0.0, "layer_scale_initial_scale": 0.01,
            "attention_bias": False,
        },
    }  # fmt: skip


# --- tensors ----------------------------------------------------------------------------------------------------------
Shapes = dict[str, tuple[int, ...]]


def _decoder_shapes(prefix: str, facts: dict[str, Any]) -> Shapes:
    """A Qwen3 decoder's layers and last norm."""
    hidden, inner, size = facts["hidden_size"], facts["intermediate_size"], facts["head_dim"]
    queries, keys = facts["num_attention_heads"] * size, facts["num_key_value_heads"] * size
    shapes: Shapes = {f"{prefix}norm.weight": (hidden,)}
    for i in range(facts["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries), "self_attn.q_norm": (size,),
            "self_attn.k_norm": (size,), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"{prefix}layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _talker_tensors(facts: dict[str, Any], kind: str) -> Shapes:
    talker = facts["talker_config"]
    predictor = talker["code_predictor_config"]
    hidden, wide, narrow = talker["hidden_size"], talker["text_hidden_size"], predictor["hidden_size"]
    shapes: Shapes = {
        "talker.model.codec_embedding.weight": (talker["vocab_size"], hidden),
        "talker.model.text_embedding.weight": (talker["text_vocab_size"], wide),
        "talker.text_projection.linear_fc1.weight": (wide, wide),
        "talker.text_projection.linear_fc1.bias": (wide,),
        "talker.text_projection.linear_fc2.weight": (hidden, wide),
        "talker.text_projection.linear_fc2.bias": (hidden,),
        "talker.codec_head.weight": (talker["vocab_size"], hidden),
    }
    if hidden != narrow:
        shapes["talker.code_predictor.small_to_mtp_projection.weight"] = (narrow, hidden)
        shapes["talker.code_predictor.small_to_mtp_projection.bias"] = (narrow,)
    shapes |= _decoder_shapes("talker.model.", talker) | _decoder_shapes("talker.code_predictor.model.", predictor)
    for book in range(BOOKS - 1):
        shapes[f"talker.code_predictor.model.codec_embedding.{book}.weight"] = (CODES, hidden)
        shapes[f"talker.code_predictor.lm_head.{book}.weight"] = (CODES, narrow)
    if kind == "base":
        from triton_omni.backends.pipelines.qwen3_tts.checkpoint import SpeakerFacts
        from triton_omni.backends.pipelines.qwen3_tts.speaker import SpeakerNetwork

        network = SpeakerNetwork(msgspec.convert(facts["speaker_encoder_config"], SpeakerFacts))
        shapes |= {f"speaker_encoder.{name}": tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    return shapes


def _codec_tensors(codec: dict[str, Any]) -> Shapes:
    from transformers import MimiConfig, MimiModel

    from triton_omni.backends.pipelines.qwen3_tts.code2wav import CodecFacts, TtsCodec

    shapes: Shapes = {}
    encoder = MimiModel(MimiConfig(**{k: v for k, v in codec["encoder_config"].items() if k != "model_type"}))
    for name, tensor in encoder.state_dict().items():
        if not name.startswith(("upsample.", "decoder_transformer.", "decoder.")):
            shapes[f"encoder.{name}"] = tuple(tensor.shape)
    facts = codec["decoder_config"]
    width, inner = facts["codebook_dim"], facts["codebook_dim"] // 2
    for name, tensor in TtsCodec(msgspec.convert(facts, CodecFacts)).state_dict().items():
        if name != "codebooks":
            place = "pre_transformer." if name.startswith(("input_proj", "output_proj")) else ""
            shapes[f"decoder.{place}{name}"] = tuple(tensor.shape)
    for group, books in (("rvq_first", 1), ("rvq_rest", BOOKS - 1)):
        shapes[f"decoder.quantizer.{group}.input_proj.weight"] = (inner, width, 1)
        shapes[f"decoder.quantizer.{group}.output_proj.weight"] = (width, inner, 1)
        for i in range(books):
            book = f"decoder.quantizer.{group}.vq.layers.{i}._codebook"
            shapes |= {f"{book}.cluster_usage": (CODES,), f"{book}.embedding_sum": (CODES, inner)}
    return shapes


def _filled(shapes: Shapes, seed: int) -> dict[str, Any]:
    """Weights large enough that two best logits are far apart and the audio is loud."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for name in sorted(shapes):
        shape = shapes[name]
        noise = torch.randn(shape, generator=generator)
        if name.endswith(("cluster_usage", "initialized")):
            tensors[name] = torch.ones(shape)
        elif "layer_scale" in name:
            tensors[name] = 0.5 + 0.1 * noise
        elif name.endswith("gamma"):
            tensors[name] = 0.3 * noise
        elif name.endswith(("alpha", "beta")):
            tensors[name] = 0.2 * noise
        elif name.endswith(("embedding_sum", "embed_sum")):
            tensors[name] = noise
        elif len(shape) < 2:
            tensors[name] = 1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.05 * noise
        elif "embed" in name:
            tensors[name] = 0.5 * noise
        else:
            scale = 0.76 if name.startswith("decoder") else 1.0
            scale /= 2 if name == LAST_CONVOLUTION else 1
            tensors[name] = noise * scale / noise[0].numel() ** 0.5
    return tensors


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
