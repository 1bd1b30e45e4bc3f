# SPDX-License-Identifier: Apache-2.0
"""A tiny random checkpoint of the Qwen3-Omni architecture in the real file layout, and its reference outputs.

`real_ids=True` keeps the numbers of the real model where code could come to depend on them: 2048 codes per codebook,
16 codebooks, the real codec ids. Everything else stays tiny.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>",
    "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
CALL_TAGS = ("<tool_call>", "</tool_call>")  # words of their own, but part of the text, as in the real tokenizer
CORPUS = ["system\n\nuser\n\nassistant\n\n" * 20, "You are Qwen, a helpful assistant that hears and speaks."] * 50 + [
    "the quick brown fox jumps over the lazy dog. hello world, this is a test of speech and images."
] * 50
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
    "{% elif c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPEAKERS = ("ethan", "chelsie", "aiden")
HIDDEN, HEAD = 64, 32
VOCAB = 512
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "mrope_section": [8, 4, 4],
    "interleaved": True,
}
"""As the published talker's config has it; the thinker's has `mrope_interleaved` as well."""


def tiny_omni(folder: Path, real_ids: bool = False, speaks: bool = True) -> Path:
    """Write the checkpoint (fp32, seeded) and its tokenizer and processor files; `speaks` False: a thinker alone."""
    import torch
    from transformers import GenerationConfig, Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    ids = _tokenizer(folder)
    _processor(folder)
    facts = _config(ids, codes=2048 if real_ids else 128, books=16 if real_ids else 4)
    config = Qwen3OmniMoeConfig(**facts, enable_audio_output=speaks)
    torch.manual_seed(1234)
    model = Qwen3OmniMoeForConditionalGeneration(config).float().eval()
    _fill(model)
    model.generation_config = GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=ids["<|endoftext|>"], do_sample=False
    )
    model.save_pretrained(folder)
    return folder


def _fill(model: Any) -> None:
    """Weights large enough that two best logits are far apart and the waveform is audible."""
    import torch

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                if "norm" in name and name.endswith("weight") and "code2wav" not in name:
                    weight.copy_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
                continue
            if "audio_tower" in name or "visual" in name:
                continue
            if "code2wav" in name:
                fan = weight.shape[1] * (weight.shape[2] if weight.dim() > 2 else 1)
                scale = 0.76 / fan**0.5  # below 0.7 it is near silence, above 0.8 it clips
            else:
                scale = 0.5 if "embed" in name else 0.6 / weight.shape[-1] ** 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


def _tokenizer(folder: Path) -> dict[str, int]:
    """Byte-level BPE as Qwen's; {special token or role word: id}."""
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
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_special_tokens(list(SPECIAL))
    inner.add_tokens(list(CALL_TAGS))
    inner.save(str(folder / "tokenizer.json"))
    model = json.loads(inner.to_str())["model"]
    _write(folder / "vocab.json", model["vocab"])
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    ids: dict[str, Any] = {word: inner.token_to_id(word) for word in (*SPECIAL, "system", "user", "assistant")}
    assert None not in ids.values(), "every role must be one token"
    roles = {
        "image_token": "<|image_pad|>", "audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
    }  # fmt: skip
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2TokenizerFast",
            "model_max_length": 32768,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "bos_token": None,
            "unk_token": None,
            "add_prefix_space": False,
            "errors": "replace",
            "extra_special_tokens": roles,
            "added_tokens_decoder": {
                str(inner.token_to_id(word)): plain | {"content": word, "special": word in SPECIAL}
                for word in (*SPECIAL, *CALL_TAGS)
            },
        }
        | roles,
    )
    _write(folder / "chat_template.json", {"chat_template": TEMPLATE})
    return ids


def _processor(folder: Path) -> None:
    vision = {
        "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": 3136, "longest_edge": 200704},
    }  # fmt: skip
    names = {"processor_class": "Qwen3OmniMoeProcessor", "video_processor_type": "Qwen2VLVideoProcessor"}
    audio = {
        "feature_extractor_type": "WhisperFeatureExtractor", "image_processor_type": "Qwen2VLImageProcessor",
        "feature_size": 128, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 30, "n_fft": 400,
        "n_samples": 480000, "nb_max_frames": 3000, "dither": 0.0, "padding_side": "right", "padding_value": 0.0,
        "return_attention_mask": True, "min_pixels": 3136, "max_pixels": 200704,
    }  # fmt: skip
    _write(folder / "preprocessor_config.json", names | vision | audio)
    _write(folder / "video_preprocessor_config.json", names | vision)


def _config(ids: dict[str, int], codes: int, books: int) -> dict[str, Any]:
    talker_vocab = 1024 + codes  # the last 1024 ids are special and never sampled
    special = dict.fromkeys(("audio_token_id",), ids["<|audio_pad|>"]) | {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    attention = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD}
    experts = {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    long = {"rope_parameters": ROPE, "rope_theta": 1e6, "max_position_embeddings": 4096}
    thinker = special | {
        "audio_end_token_id": ids["<|audio_end|>"], "vision_end_token_id": ids["<|vision_end|>"],
        "user_token_id": ids["user"], "dtype": "float32",
        "audio_config": {
            "num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
            "d_model": 64, "output_dim": HIDDEN, "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 16,
            "max_source_positions": 1500,
        },
        "vision_config": {
            "depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": HIDDEN,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1], "image_size": 128, "apply_vit_abs_pos_embed": True,
            "spatial_patch_size": 16, "tokens_per_second": 2,
        },
        "text_config": attention | experts | long | {"rope_parameters": ROPE | {"mrope_interleaved": True}} | {
            "vocab_size": VOCAB, "num_hidden_layers": 4, "norm_topk_prob": True,
            "shared_expert_intermediate_size": 0, "tie_word_embeddings": False,
        },
    }  # fmt: skip
    talker = special | {
        "num_code_groups": books, "thinker_hidden_size": HIDDEN, "accept_hidden_layer": 3, "spatial_merge_size": 2,
        "output_router_logits": False, "codec_nothink_id": talker_vocab - 10, "codec_think_bos_id": talker_vocab - 9,
        "codec_think_eos_id": talker_vocab - 8, "codec_pad_id": talker_vocab - 7, "codec_bos_id": talker_vocab - 6,
        "codec_eos_token_id": talker_vocab - 5,
        "speaker_id": {name: talker_vocab - 4 + i for i, name in enumerate(SPEAKERS)},
        "text_config": attention | experts | long | {
            "vocab_size": talker_vocab, "num_hidden_layers": 3, "norm_topk_prob": False,
            "shared_expert_intermediate_size": 32,
        },
        "code_predictor_config": attention | {
            "vocab_size": codes, "intermediate_size": 96, "num_hidden_layers": 2, "num_code_groups": books,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 256,
        },
    }  # fmt: skip
    code2wav = {
        "codebook_size": codes, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_quantizers": books, "decoder_dim": 64,
        "sliding_window": 16,
    }  # fmt: skip
    return {
        "thinker_config": thinker, "talker_config": talker, "code2wav_config": code2wav, "dtype": "float32",
        "im_start_token_id": ids["<|im_start|>"], "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<tts_pad>"], "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"], "system_token_id": ids["system"], "user_token_id": ids["user"],
        "assistant_token_id": ids["assistant"],
    }  # fmt: skip


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


# --- reference -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Spoken:
    """What transformers makes of one chat, greedily."""

    prompt_ids: list[int]
    token_ids: list[int]
    codes: list[list[int]]
    """(books, frames)"""
    wave: Any
    """float32 samples"""


class Reference:
    """transformers' own Qwen3-Omni on the same folder."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration

        self.model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        # transformers asks the talker's config for the audio encoder's when audio and images meet, and it has none
        self.model.talker.config.audio_config = self.model.config.thinker_config.audio_config
        self.processor = AutoProcessor.from_pretrained(folder)

    def speak(self, messages: list[dict[str, Any]], tokens: int, frames: int = 40, **how: Any) -> Spoken:
        """Greedy thinker, greedy talker (repetition penalty 1.05), all codebooks and the waveform, unless `how`, words
        for transformers' generate, says otherwise."""
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = self.processor.tokenizer(text, return_tensors="pt")
        return self.generate(dict(inputs), tokens, frames, **how)

    def see(self, messages: list[dict[str, Any]], tokens: int, frames: int, **media: Any) -> Spoken:
        """The same with `images`, `audio` and `videos`, in the order in which the messages name them."""
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = dict(self.processor(text=text, return_tensors="pt", **media))
        if "use_audio_in_video" in media:
            inputs["use_audio_in_video"] = media["use_audio_in_video"]
        return self.generate(inputs, tokens, frames)

    def generate(self, inputs: dict[str, Any], tokens: int, frames: int = 40, **how: Any) -> Spoken:
        caught: dict[str, Any] = {}
        decode = self.model.code2wav.chunked_decode

        def catching(codes: Any, **kwargs: Any) -> Any:
            caught["codes"] = codes.clone()
            return decode(codes, **kwargs)

        self.model.code2wav.chunked_decode = catching
        try:
            greedy = {
                "thinker_max_new_tokens": tokens,
                "thinker_do_sample": False,
                "thinker_eos_token_id": [self.model.config.im_end_token_id],
                "talker_do_sample": False,
                "talker_max_new_tokens": frames,
                "talker_repetition_penalty": 1.05,
            }
            sequence, wave = self.model.generate(**inputs, **(greedy | how))
        finally:
            self.model.code2wav.chunked_decode = decode
        prompt = inputs["input_ids"]
        return Spoken(
            prompt[0].tolist(), sequence[0, prompt.shape[1] :].tolist(), caught["codes"][0].tolist(), wave[0, 0].numpy()
        )
