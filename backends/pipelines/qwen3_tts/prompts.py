# SPDX-License-Identifier: Apache-2.0
"""The prompt of a run, by ids: what each input row of the talker is the sum of.

    [instructions] header | language tags | voice | bos + pad | text …

Each row is a text token; codec ids, a voice's vector and the frames of a recording are added to some. Text is read
whole before the first frame, or one token per frame. Frames of a recording (with its transcript in front of the text)
let the model go on in the same voice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from triton_omni.backends.pipelines.qwen3_tts.checkpoint import TtsFacts

HEADER_TOKENS = 3  # <|im_start|> assistant \n
ANSWER_END_TOKENS = 5  # <|im_end|> \n <|im_start|> assistant \n
TURN_END_TOKENS = 2  # <|im_end|> \n
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class TtsPrompt:
    """Rows of a prompt.

    token_ids  a text token per row
    codec_ids  (row, codec id)
    vector     a voice's vector (hidden,) float32, added to row `vector_row`
    frames     codes of a recording (frames, books) int16, added to the rows from `frames_row` on
    """

    token_ids: list[int]
    codec_ids: list[tuple[int, int]]
    vector_row: int = 0
    vector: np.ndarray | None = None
    frames_row: int = 0
    frames: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class SpokenTokens:
    """Token ids of what is said and how.

    header        the start of the assistant's turn
    text          what is to be said
    transcript    what a recording says; empty without one
    instructions  a whole user turn; may be empty
    """

    header: Sequence[int]
    text: Sequence[int]
    transcript: Sequence[int] = ()
    instructions: Sequence[int] = ()


@dataclass(slots=True)
class _Rows:
    """A prompt under construction."""

    token_ids: list[int] = field(default_factory=list[int])
    codec_ids: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def add(self, token: int, codec_id: int | None = None) -> None:
        if codec_id is not None:
            self.codec_ids.append((len(self.token_ids), codec_id))
        self.token_ids.append(token)


def make_prompt(
    facts: TtsFacts,
    tokens: SpokenTokens,
    *,
    language: str = AUTO,
    voice: str = "",
    vector: np.ndarray | None = None,
    frames: np.ndarray | None = None,
    whole: bool = True,
) -> tuple[TtsPrompt, list[int]]:
    """The prompt, and the text tokens of the steps after it, as the model was trained (qwen-tts 0.1.1).

    language  a key of `codec_language_id`, or AUTO
    voice     a key of `spk_id`, or empty
    vector, frames  see TtsPrompt
    whole     read all text before the first frame
    """
    talker, pad = facts.talker_config, facts.tts_pad_token_id
    rows = _Rows([*tokens.instructions, *tokens.header])
    for tag in _language_tags(facts, language, voice):
        rows.add(pad, tag)
    vector_row = len(rows.token_ids)
    if voice or vector is not None:
        rows.add(pad, talker.spk_id[voice] if voice else None)
    rows.add(facts.tts_bos_token_id, talker.codec_pad_id)
    words = [*tokens.transcript, *tokens.text, facts.tts_eos_token_id]
    frames_row, count = 0, 0 if frames is None else len(frames)
    if whole:
        for word in words:
            rows.add(word, talker.codec_pad_id)
        rows.add(pad, talker.codec_bos_id)
        frames_row = len(rows.token_ids)
        rows.token_ids += [pad] * count
        later: list[int] = []
    else:
        frames_row = len(rows.token_ids) + 1
        said = (words + [pad] * count)[: 1 + count]
        rows.add(said[0], talker.codec_bos_id)
        rows.token_ids += said[1:]
        later = words[1 + count :]
    return TtsPrompt(rows.token_ids, rows.codec_ids, vector_row, vector, frames_row, frames), later


def prompt_length(tokens: SpokenTokens, frames: int, whole: bool) -> int:
    """Rows that `make_prompt` makes at most, without making them."""
    fixed = len(tokens.instructions) + len(tokens.header) + 7  # four tags, voice, bos, codec bos
    words = len(tokens.transcript) + len(tokens.text) + 1
    return fixed + frames + (words if whole else 0)


def _language_tags(facts: TtsFacts, language: str, voice: str) -> list[int]:
    talker = facts.talker_config
    if voice and language in (AUTO, "chinese"):
        language = talker.dialect(voice) or language
    if language == AUTO:
        return [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
    return [
        talker.codec_think_id,
        talker.codec_think_bos_id,
        talker.codec_language_id[language],
        talker.codec_think_eos_id,
    ]
