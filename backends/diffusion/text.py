# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids to features."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Prompt(NamedTuple):
    """A prompt in its template. `picture_tokens` of its tokens stand for pictures."""

    ids: tuple[int, ...]
    skip: int
    picture_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens the transformer sees: all but the template's first ones."""
        return len(self.ids) - self.skip


class Template:
    """The words around a prompt, as the stock pipelines have them, except that special tokens in a prompt are text."""

    def __init__(self, tokenizer: Any, template: str, skip: int) -> None:
        self._tokenizer = tokenizer
        self._prefix, self._suffix = template.split("{}")
        self._skip = skip
        self._specials = tuple(tokenizer.get_added_vocab())
        found = len(tokenizer(self._prefix).input_ids)
        if found != skip:
            raise ValueError(
                f"the tokenizer makes {found} tokens of the prompt template, but the pipeline skips {skip}: "
                "prompts would be cut or would leak the template"
            )

    def prompt(self, text: str, before: str = "") -> Prompt:
        """`text` after our own words `before`. It cannot end its turn: `<|im_end|>` in it is spelt out."""
        prefix = self._prefix + before
        if not any(special in text for special in self._specials):
            return Prompt(tuple(self._tokenizer(prefix + text + self._suffix).input_ids), self._skip)
        spelt = self._tokenizer(text, split_special_tokens=True).input_ids
        ids = (*self._tokenizer(prefix).input_ids, *spelt, *self._tokenizer(self._suffix).input_ids)
        return Prompt(ids, self._skip)


class PromptEncoder:
    """Features of prompts that are text only."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self._template = Template(pipe.tokenizer, pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx)
        self._encoder, self._device = pipe.text_encoder, device

    def prompt(self, text: str) -> Prompt:
        """The prompt in its template."""
        return self._template.prompt(text)

    def features(self, prompt: Prompt) -> torch.Tensor:
        """(1, prompt.tokens, dim) on the device."""
        return features(self._encoder, prompt, self._device)


def features(encoder: Any, prompt: Prompt, device: torch.device, **pictures: Any) -> torch.Tensor:
    """(1, prompt.tokens, dim): the encoder's last hidden states after the template's first tokens."""
    tokens = torch.tensor([prompt.ids], device=device)
    hidden = encoder(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        output_hidden_states=True,
        logits_to_keep=1,  # nobody reads them, and all of them would be large
        **pictures,
    ).hidden_states[-1]
    seen = hidden[:, prompt.skip :].to(encoder.dtype)
    return seen.clone(memory_format=torch.contiguous_format)  # a view would keep the template's features, uncounted
