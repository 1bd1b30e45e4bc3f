# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids to features, with the newest features kept."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch


class PromptEncoder:
    """Encodes as the stock pipeline does, except that special tokens in a prompt are text like any other."""

    def __init__(self, pipe: Any, device: torch.device, capacity: int) -> None:
        self._tokenizer, self._encoder, self._device = pipe.tokenizer, pipe.text_encoder, device
        self._prefix, self._suffix = pipe.prompt_template_encode.split("{}")
        self._skip = pipe.prompt_template_encode_start_idx
        self._specials = tuple(self._tokenizer.get_added_vocab())
        self._capacity = capacity
        self._kept: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self.encoded = 0
        """Encoder forwards so far."""
        found = len(self._tokenizer(self._prefix).input_ids)
        if found != self._skip:
            raise ValueError(
                f"the tokenizer makes {found} tokens of the prompt template, but the pipeline skips {self._skip}: "
                "prompts would be cut or would leak the template"
            )

    def ids(self, prompt: str) -> tuple[int, ...]:
        """Token ids of the prompt in its template. A prompt cannot end its turn: `<|im_end|>` in it is spelt out."""
        if not any(special in prompt for special in self._specials):
            return tuple(self._tokenizer(self._prefix + prompt + self._suffix).input_ids)
        spelt = self._tokenizer(prompt, split_special_tokens=True).input_ids
        return (*self._tokenizer(self._prefix).input_ids, *spelt, *self._tokenizer(self._suffix).input_ids)

    def count(self, ids: tuple[int, ...]) -> int:
        """Tokens the transformer sees."""
        return len(ids) - self._skip

    def knows(self, ids: tuple[int, ...] | None) -> bool:
        """True if `features` would not have to compute."""
        return ids is None or ids in self._kept

    def features(self, ids: tuple[int, ...]) -> torch.Tensor:
        """(1, count(ids), dim) on the device."""
        if ids in self._kept:
            self._kept.move_to_end(ids)
            return self._kept[ids]
        tokens = torch.tensor([ids], device=self._device)
        hidden = self._encoder(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True
        ).hidden_states[-1]
        found = hidden[:, self._skip :].to(self._encoder.dtype).contiguous()
        self.encoded += 1
        self._kept[ids] = found
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
        return found
