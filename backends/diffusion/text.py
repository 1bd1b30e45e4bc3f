# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids to features, with the newest features kept."""

from __future__ import annotations

from collections import OrderedDict
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

    def __init__(self, pipe: Any, device: torch.device, capacity: int) -> None:
        self._template = Template(pipe.tokenizer, pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx)
        self._encoder, self._device = pipe.text_encoder, device
        self._capacity = capacity
        self._kept: OrderedDict[Prompt, torch.Tensor] = OrderedDict()
        self.encoded = 0
        """Encoder forwards so far."""

    def prompt(self, text: str) -> Prompt:
        """The prompt in its template."""
        return self._template.prompt(text)

    def knows(self, prompt: Prompt | None) -> bool:
        """True if `features` would not have to compute."""
        return prompt is None or prompt in self._kept

    def features(self, prompt: Prompt) -> torch.Tensor:
        """(1, prompt.tokens, dim) on the device."""
        if prompt in self._kept:
            self._kept.move_to_end(prompt)
            return self._kept[prompt]
        tokens = torch.tensor([prompt.ids], device=self._device)
        hidden = self._encoder(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True
        ).hidden_states[-1]
        found = hidden[:, prompt.skip :].to(self._encoder.dtype).contiguous()
        self.encoded += 1
        self._kept[prompt] = found
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
        return found
