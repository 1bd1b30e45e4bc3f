# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints in the real file layout, made by code from fixed seeds."""

from __future__ import annotations

from pathlib import Path

END_OF_TURN = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "system\nuser\nassistant\n",
    "You are a helpful assistant that hears and speaks.",
    "The quick brown fox jumps over the lazy dog. Hello world, this is a test of speech and images!",
    "Grüße aus Köln, ça va, 你好, привет: 1 2 3 4 5 6 7 8 9 0",
)


def tiny_llama(folder: Path, seed: int = 11) -> Path:
    """A two-layer fp32 llama (vocabulary of bytes, some merges and three special tokens) with a chat template."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    vocab, end = _tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention has a kernel for
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:  # wide enough that two best logits are never close
                scale = 0.5 if "embed" in name else 1.2 / weight.shape[-1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
    model.save_pretrained(folder)
    return folder


def _tokenizer(folder: Path) -> tuple[int, int]:
    """Write a byte-level BPE tokenizer; (vocabulary size, end-of-turn id)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END_OF_TURN, pad_token=SPECIAL[0])
    outer.chat_template = CHAT_TEMPLATE
    outer.save_pretrained(folder)
    return inner.get_vocab_size(), outer.vocab[END_OF_TURN]
