# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids to text features, and a cache of encoder outputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from triton_omni.backends.diffusion.upstream import (
    DiffusionPipeline,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
)

EncodeTasks = dict[Hashable, Callable[[], torch.Tensor]]
"""What a run needs before its first step: content key → function that computes it."""


class Prompt(NamedTuple):
    """Token ids of a prompt in its template. The first `skip` are the template's; `image_tokens` stand for images."""

    ids: tuple[int, ...]
    skip: int
    image_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens that the transformer sees: all but the first `skip`."""
        return len(self.ids) - self.skip


class PromptTemplate:
    """The prompt template of a stock pipeline. Special tokens inside a user's prompt are encoded as plain text."""

    def __init__(self, tokenizer: Qwen2Tokenizer, template: str, skip: int) -> None:
        self._tokenizer = tokenizer
        self._prefix, self._suffix = template.split("{}")
        self._skip = skip
        self._specials = tuple(tokenizer.get_added_vocab())
        prefix_tokens = len(tokenizer(self._prefix).input_ids)
        if prefix_tokens != skip:
            raise ValueError(
                f"the tokenizer encodes the prompt template's prefix as {prefix_tokens} tokens, but the pipeline "
                f"skips {skip}: prompts would be cut or would contain the template"
            )

    def prompt(self, text: str, before: str = "") -> Prompt:
        """Encode `text`, preceded by `before` (trusted, may contain special tokens)."""
        prefix = self._prefix + before
        if not any(special in text for special in self._specials):
            return Prompt(tuple(self._tokenizer(prefix + text + self._suffix).input_ids), self._skip)
        plain = self._tokenizer(text, split_special_tokens=True).input_ids
        ids = (*self._tokenizer(prefix).input_ids, *plain, *self._tokenizer(self._suffix).input_ids)
        return Prompt(ids, self._skip)


class PromptEncoder:
    """Text features of prompts without images."""

    def __init__(self, pipe: DiffusionPipeline, device: torch.device) -> None:
        self._template = PromptTemplate(
            pipe.tokenizer, pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx
        )
        self._encoder, self._device = pipe.text_encoder, device

    def prompt(self, text: str) -> Prompt:
        """Encode `text` in the template."""
        return self._template.prompt(text)

    def features(self, prompt: Prompt) -> torch.Tensor:
        """(1, prompt.tokens, dim) on the device."""
        return text_features(self._encoder, prompt, self._device)


def text_features(
    encoder: Qwen2_5_VLForConditionalGeneration, prompt: Prompt, device: torch.device, **images: torch.Tensor
) -> torch.Tensor:
    """The encoder's last hidden states without the template's prefix, (1, prompt.tokens, dim)."""
    tokens = torch.tensor([prompt.ids], device=device)
    hidden = encoder(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        output_hidden_states=True,
        logits_to_keep=1,  # logits are not used; all of them would be large
        **images,
    ).hidden_states[-1]
    features = hidden[:, prompt.skip :].to(encoder.dtype)
    return features.clone(memory_format=torch.contiguous_format)  # a view would keep the whole output alive


class EncodingCache:
    """LRU cache of tensors, bounded by bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
        self.bytes = 0

    def get(self, key: Hashable) -> torch.Tensor | None:
        """The tensor of this key, which becomes the newest; None if it is not cached."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Add a tensor under a new key and evict the oldest until all fit; one larger than the cache is not added."""
        assert key not in self._entries
        if tensor.nbytes > self._max_bytes:
            return
        self._entries[key] = tensor
        self.bytes += tensor.nbytes
        while self.bytes > self._max_bytes:
            self.bytes -= self._entries.popitem(last=False)[1].nbytes
