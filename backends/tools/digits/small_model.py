# SPDX-License-Identifier: Apache-2.0
"""A QwenImagePipeline small enough to train and run on a laptop: the stock classes, few and narrow layers.

The unmodified pipeline drops the first 34 tokens of its prompt template, so the tokenizer built here must turn that
prefix into exactly 34 tokens; `make_tokenizer` checks it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from triton_omni.backends.diffusion.upstream import (
    PRETOKENIZE_REGEX,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

TEMPLATE_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
TEMPLATE_PREFIX_TOKENS = 34
WORDS = """zero one two three four five six seven eight nine red green blue black white yellow orange purple pink
cyan handwritten digit number on a an the background image of in ink drawing picture small large paper written please
draw paint me show photo sketch with and figure numeral cat dog sign that says hello world"""


@dataclass(frozen=True)
class Sizes:
    """How large the modules are; the defaults are a random model for tests."""

    layers: int = 2
    heads: int = 2
    head_dim: int = 16
    rope_axes: tuple[int, int, int] = (4, 6, 6)
    latent_channels: int = 4
    vae_base: int = 8
    text_dim: int = 64
    text_layers: int = 2


def make_tokenizer(texts: Sequence[str] = (), specials: Sequence[str] = ()) -> Qwen2Tokenizer:
    """A byte-level BPE over the template's and the prompts' words and `texts`; other text falls back to bytes."""
    template = ["Describe", "system", "user", "assistant"]
    template += [" " + w for w in TEMPLATE_PREFIX.split("Describe ")[1].split(":")[0].replace(",", "").split()]
    corpus = [w for w in template for _ in range(50)]
    corpus += [w for word in WORDS.split() for w in (word, " " + word) for _ in range(20)]
    corpus += [w.capitalize() for w in WORDS.split() for _ in range(5)]
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=1100,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus + [text for text in texts for _ in range(50)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges: Any = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    result = Qwen2Tokenizer(
        vocab=model["vocab"], merges=merges, additional_special_tokens=["<|im_start|>", "<|im_end|>", *specials]
    )
    assert len(result(TEMPLATE_PREFIX).input_ids) == TEMPLATE_PREFIX_TOKENS
    return result


def make_text_encoder(vocabulary: int, sizes: Sizes, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """A random Qwen2.5-VL. Random is enough: it keeps tokens apart, and what they mean is learned above it."""
    torch.manual_seed(seed)
    half = sizes.text_dim // 4 // 2
    mrope = [half // 4, half // 4, half - 2 * (half // 4)]
    text = {
        "vocab_size": vocabulary, "hidden_size": sizes.text_dim, "intermediate_size": sizes.text_dim * 2,
        "num_hidden_layers": sizes.text_layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "type": "default", "mrope_section": mrope, "rope_theta": 1e4},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": sizes.text_dim,
        "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=1, video_token_id=2, vision_start_token_id=3,
        vision_end_token_id=4, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Qwen-Image's own schedule: dynamic shift by image size, ending at sigma 0.02."""
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256, base_shift=0.5, max_image_seq_len=8192, max_shift=0.9, num_train_timesteps=1000,
        shift=1.0, shift_terminal=0.02, time_shift_type="exponential", use_dynamic_shifting=True,
    )  # fmt: skip


def make_vae(sizes: Sizes, seed: int) -> AutoencoderKLQwenImage:
    """A VAE of factor 8, random."""
    torch.manual_seed(seed)
    channels = sizes.latent_channels
    return AutoencoderKLQwenImage(
        base_dim=sizes.vae_base, z_dim=channels, dim_mult=[1, 2, 4, 4], num_res_blocks=1,
        temperal_downsample=[False, True, True], latents_mean=[0.0] * channels, latents_std=[1.0] * channels,
    ).eval()  # fmt: skip


def make_transformer(sizes: Sizes, seed: int) -> QwenImageTransformer2DModel:
    """A dual-stream transformer, random."""
    torch.manual_seed(seed)
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=4 * sizes.latent_channels, out_channels=sizes.latent_channels,
        num_layers=sizes.layers, attention_head_dim=sizes.head_dim, num_attention_heads=sizes.heads,
        joint_attention_dim=sizes.text_dim, axes_dims_rope=sizes.rope_axes,
    ).eval()  # fmt: skip


def make_pipeline(sizes: Sizes = Sizes(), seed: int = 0) -> QwenImagePipeline:
    """A whole random pipeline; equal seeds give equal weights."""
    tokenizer = make_tokenizer()
    encoder = make_text_encoder(len(tokenizer), sizes, seed)
    vae, transformer = make_vae(sizes, seed + 1), make_transformer(sizes, seed + 2)
    return QwenImagePipeline(make_scheduler(), vae, encoder, tokenizer, transformer)
