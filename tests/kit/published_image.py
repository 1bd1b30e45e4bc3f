# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image and Qwen-Image-Edit as published: configuration values, parameter names, file layout.

Facts from the checkpoints' configuration files and weight indices. `save_checkpoint` writes a small random checkpoint
in that layout: the same files, keys and parameter names; only sizes differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCHEDULER: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.34.0.dev0", "base_image_seq_len": 256,
    "base_shift": 0.5, "invert_sigmas": False, "max_image_seq_len": 8192, "max_shift": 0.9, "num_train_timesteps": 1000,
    "shift": 1.0, "shift_terminal": 0.02, "stochastic_sampling": False, "time_shift_type": "exponential",
    "use_beta_sigmas": False, "use_dynamic_shifting": True, "use_exponential_sigmas": False, "use_karras_sigmas": False,
}  # fmt: skip
TRANSFORMER: dict[str, Any] = {
    "_class_name": "QwenImageTransformer2DModel", "_diffusers_version": "0.34.0.dev0", "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56], "guidance_embeds": False, "in_channels": 64, "joint_attention_dim": 3584,
    "num_attention_heads": 24, "num_layers": 60, "out_channels": 16, "patch_size": 2, "pooled_projection_dim": 768,
}  # fmt: skip
TRANSFORMER_BYTES = 40_860_802_176
"""`total_size` of the weight index, bfloat16."""
VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKLQwenImage", "_diffusers_version": "0.34.0.dev0", "attn_scales": [], "base_dim": 96,
    "dim_mult": [1, 2, 4, 4], "dropout": 0.0, "num_res_blocks": 2, "temperal_downsample": [False, True, True],
    "z_dim": 16,
    "latents_mean": [
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
    ],
    "latents_std": [
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
        3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916,
    ],
}  # fmt: skip
TEXT_ENCODER: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "image_token_id": 151655,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "video_token_id": 151656, "vision_end_token_id": 151653,
    "vision_start_token_id": 151652, "vision_token_id": 151654, "vocab_size": 152064,
    "vision_config": {
        "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu", "hidden_size": 1280,
        "in_channels": 3, "in_chans": 3, "intermediate_size": 3420, "model_type": "qwen2_5_vl", "num_heads": 16,
        "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "temporal_patch_size": 2, "tokens_per_second": 2, "window_size": 112,
    },
}  # fmt: skip
TEXT_ENCODER_BYTES = 16_584_333_312
PREPROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711], "max_pixels": 12845056, "merge_size": 2, "min_pixels": 3136,
    "patch_size": 14, "processor_class": "Qwen2_5_VLProcessor", "resample": 3, "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 12845056, "shortest_edge": 3136}, "temporal_patch_size": 2,
}  # fmt: skip
COMPONENTS: dict[str, list[str]] = {
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}
PROCESSOR = ["transformers", "Qwen2VLProcessor"]
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

_TRANSFORMER_NAMES = """
img_in.{weight,bias} txt_in.{weight,bias} txt_norm.weight norm_out.linear.{weight,bias} proj_out.{weight,bias}
time_text_embed.timestep_embedder.linear_{1,2}.{weight,bias}
transformer_blocks.N.{img,txt}_mod.1.{weight,bias}
transformer_blocks.N.{img,txt}_mlp.net.{0.proj,2}.{weight,bias}
transformer_blocks.N.attn.{to_q,to_k,to_v,to_out.0,to_add_out}.{weight,bias}
transformer_blocks.N.attn.add_{q,k,v}_proj.{weight,bias}
transformer_blocks.N.attn.norm_{q,k,added_q,added_k}.weight
"""
_TEXT_NAMES = """
model.embed_tokens.weight model.norm.weight lm_head.weight
model.layers.N.{input,post_attention}_layernorm.weight
model.layers.N.self_attn.{q,k,v}_proj.{weight,bias} model.layers.N.self_attn.o_proj.weight
model.layers.N.mlp.{gate,up,down}_proj.weight
"""
_VISION_NAMES = """
visual.patch_embed.proj.weight visual.merger.ln_q.weight visual.merger.mlp.{0,2}.{weight,bias}
visual.blocks.N.norm{1,2}.weight visual.blocks.N.attn.{qkv,proj}.{weight,bias}
visual.blocks.N.mlp.{gate,up,down}_proj.{weight,bias}
"""


def transformer_names(layers: int = TRANSFORMER["num_layers"]) -> set[str]:
    """Parameter names in the transformer's weight files."""
    return set(_expand(_TRANSFORMER_NAMES, layers))


def text_encoder_names(
    layers: int = TEXT_ENCODER["num_hidden_layers"], depth: int = TEXT_ENCODER["vision_config"]["depth"]
) -> set[str]:
    """Parameter names in the text encoder's weight files."""
    return {*_expand(_TEXT_NAMES, layers), *_expand(_VISION_NAMES, depth)}


def _expand(patterns: str, count: int) -> Iterable[str]:
    """`{a,b}` as in a shell; `.N.` is every layer."""
    for pattern in patterns.split():
        names = [pattern]
        while "{" in names[0]:
            names = [
                re.sub(r"\{([^}]*)\}", choice, name, count=1)
                for name in names
                for choices in re.findall(r"^[^{]*\{([^}]*)\}", name)
                for choice in choices.split(",")
            ]
        yield from (name.replace(".N.", f".{i}.") for name in names for i in range(count if ".N." in name else 1))


def small_configs(tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Component → the published configuration with small sizes and the ids of a small tokenizer."""
    ids = dict(zip(SPECIAL_TOKENS, tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)), strict=True))
    vision = TEXT_ENCODER["vision_config"] | {
        "depth": 2, "fullatt_block_indexes": [1], "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 64,
    }  # fmt: skip
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "max_window_layers": 2, "vocab_size": len(tokenizer), "vision_config": vision,
        "rope_scaling": {"mrope_section": [2, 2, 4], "rope_type": "default", "type": "default"},
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"], "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"], "vision_token_id": ids["<|video_pad|>"],
    }  # fmt: skip
    transformer = {
        "attention_head_dim": 16, "axes_dims_rope": [4, 6, 6], "in_channels": 16, "joint_attention_dim": 64,
        "num_attention_heads": 1, "num_layers": 2, "out_channels": 4,
    }  # fmt: skip
    vae = {"base_dim": 8, "num_res_blocks": 1, "z_dim": 4} | {
        name: VAE[name][:4] for name in ("latents_mean", "latents_std")
    }
    return {
        "scheduler": SCHEDULER, "transformer": TRANSFORMER | transformer, "vae": VAE | vae,
        "text_encoder": TEXT_ENCODER | text,
    }  # fmt: skip


def save_checkpoint(folder: Path, edit: bool = False) -> Path:
    """Write a small random bfloat16 checkpoint (0.5 MB) as Qwen-Image, or Qwen-Image-Edit, is laid out."""
    import torch

    from tests.kit.tiny_edit import PREFIX
    from triton_omni.backends.diffusion import upstream
    from triton_omni.backends.tools.digits.small_model import make_tokenizer

    tokenizer = make_tokenizer([PREFIX], SPECIAL_TOKENS[3:])
    configs = small_configs(tokenizer)
    modules: dict[str, Any] = {}
    torch.manual_seed(0)
    for name in ("transformer", "vae"):
        modules[name] = getattr(upstream, COMPONENTS[name][1]).from_config(configs[name])
    text_config = upstream.Qwen2_5_VLConfig.from_dict(configs["text_encoder"])
    modules["text_encoder"] = upstream.Qwen2_5_VLForConditionalGeneration(text_config)
    for name, module in modules.items():
        module.to(torch.bfloat16).save_pretrained(folder / name, max_shard_size="1GB" if name == "vae" else "20KB")
        _write(folder / name / "config.json", configs[name])
    _write(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    _save_tokenizer(folder / "tokenizer", tokenizer)
    index = {
        "_class_name": "QwenImageEditPipeline" if edit else "QwenImagePipeline",
        "_diffusers_version": "0.34.0.dev0",
    }
    if edit:
        _save_tokenizer(folder / "processor", tokenizer)
        tokenizer.backend_tokenizer.save(str(folder / "processor" / "tokenizer.json"))
        _write(folder / "processor" / "preprocessor_config.json", PREPROCESSOR)
    _write(folder / "model_index.json", index | COMPONENTS | ({"processor": PROCESSOR} if edit else {}))
    return folder


def _save_tokenizer(folder: Path, tokenizer: Any) -> None:
    """vocab.json and merges.txt with the special tokens beside them, without tokenizer.json."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    ids = dict(zip(SPECIAL_TOKENS, tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)), strict=True))
    details = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    _write(folder / "vocab.json", {token: i for token, i in model["vocab"].items() if token not in ids})
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    _write(folder / "added_tokens.json", ids)
    _write(folder / "special_tokens_map.json", {
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]), "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    })  # fmt: skip
    _write(folder / "tokenizer_config.json", {
        "add_bos_token": False, "add_prefix_space": False,
        "added_tokens_decoder": {str(i): {"content": token, **details} for token, i in ids.items()},
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]), "bos_token": None,
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
        "extra_special_tokens": {}, "model_max_length": 131072, "pad_token": "<|endoftext|>",
        "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    })  # fmt: skip


def _write(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
