# SPDX-License-Identifier: Apache-2.0
"""Chats to token ids by the checkpoint's own chat template. Text of a request never becomes a control token.

A tokenizer reads `<|im_end|>` in a user's text as the token that ends a turn. Control strings in the request's text are
therefore rendered as one private character each, and their plain spelling is encoded by itself. A chat without such
strings is rendered and encoded as a whole, exactly as transformers does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from transformers.utils.hub import cached_file

from triton_omni.backends.core.engine import OptionsError

if TYPE_CHECKING:
    from transformers import AddedToken

PRIVATE_CHARS = range(0xF0000, 0xFFFFE)
"""Unicode's supplementary private use area A: characters without a meaning."""


def read_chat_template(model: str) -> str:
    """The chat template of a checkpoint folder or hub name; raises OptionsError if it has none.

    Looked up as transformers' tokenizer does, then in chat_template.json, the legacy file of a multimodal processor:
    some published checkpoints have only that.
    """
    jinja = _file(model, "chat_template.jinja")
    if jinja is not None:
        return jinja.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = _file(model, name)
        template = None if file is None else json.loads(file.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, str):
            return template
    raise OptionsError(
        f"model '{model}' has no chat template: neither chat_template.jinja nor chat_template.json, and none in "
        "tokenizer_config.json"
    )


def _file(model: str, name: str) -> Path | None:
    path = cached_file(
        model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if path is None else Path(path)


class ChatTokenizer(Protocol):
    """What is used of transformers' tokenizers."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]],
        *,
        tools: object,
        chat_template: str,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str: ...


class ChatEncoder:
    """Renders and encodes chats with one tokenizer and one template."""

    def __init__(self, tokenizer: ChatTokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.added_tokens_decoder.values()
        self._all = _either(token.content for token in added)
        self._special = _either(token.content for token in added if token.special)

    def encode(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None = None
    ) -> list[int]:
        """Token ids of a chat, ending in the header of the answer.

        In assistant turns only special tokens are control strings: tags such as <think> are part of what the model
        wrote.
        """
        escaper = _Escaper(json.dumps([messages, tools], ensure_ascii=False))
        safe: list[dict[str, object]] = []
        for message in messages:
            control = self._special if message["role"] == "assistant" else self._all
            safe.append(
                {key: value if key == "role" else escaper.escape(value, control) for key, value in message.items()}
            )
        text = self._tokenizer.apply_chat_template(
            safe,
            tools=escaper.escape(tools, self._all),
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=True,
        )
        if not escaper.escaped:
            return self.encode_text(text)
        ids: list[int] = []
        for segment in re.split(f"([{''.join(escaper.escaped)}])", text):
            if segment in escaper.escaped:
                ids += self._plain(escaper.escaped[segment])
            elif segment:
                ids += self.encode_text(segment)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text outside any chat: what its continuation follows. Control strings are ordinary text."""
        ids: list[int] = []
        start = 0
        for match in self._all.finditer(text):
            ids += self.encode_text(text[start : match.start()]) + self._plain(match[0])
            start = match.end()
        return ids + self.encode_text(text[start:])

    def encode_text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)  # the template writes them

    def _plain(self, control: str) -> list[int]:
        """A control string as ordinary text: cut behind its first character, the tokenizer does not find it."""
        return self.encode_text(control[:1]) + self.encode_text(control[1:])


class _Escaper:
    """Replaces control strings by private characters that `text` does not contain; `escaped`: character → string."""

    def __init__(self, text: str) -> None:
        self._unused = (chr(code) for code in PRIVATE_CHARS if chr(code) not in text)
        self._char_of: dict[str, str] = {}
        self.escaped: dict[str, str] = {}

    def escape(self, value: object, control: re.Pattern[str]) -> object:
        """`value` with the control strings in all its texts replaced, also in keys."""
        if isinstance(value, str):
            return control.sub(lambda match: self._char(match[0]), value)
        if isinstance(value, Mapping):
            return {self.escape(key, control): self.escape(item, control) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item, control) for item in value]
        return value

    def _char(self, control: str) -> str:
        if control not in self._char_of:
            char = next(self._unused)
            self._char_of[control] = char
            self.escaped[char] = control
        return self._char_of[control]


def _either(strings: Iterator[str]) -> re.Pattern[str]:
    """Matches any of the strings, the longest first; nothing if there are none."""
    longest_first = sorted({re.escape(string) for string in strings if string.strip()}, key=len, reverse=True)
    return re.compile("|".join(longest_first) or r"(?!)")
