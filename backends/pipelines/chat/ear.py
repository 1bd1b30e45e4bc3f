# SPDX-License-Identifier: Apache-2.0
"""Whisper: a window of sound to phrases, and when these and their words are said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from triton_omni.backends.pipelines.chat.align import Word, first_frames, loud_frames, words_at
from triton_omni.backends.pipelines.chat.sound import SAMPLE_RATE_HZ

MAX_TOKENS = 224  # of a window; Whisper's own bound, half of its decoder's positions
NO_SPEECH, LOW_LOG_PROBABILITY = 0.6, -1.0  # Whisper's own bounds: likely no speech, and words hardly believed
SURELY_NO_SPEECH = 0.8  # silence has 0.95 and yet a firm "you"; speech, faint or late in a window, stays below 0.4
SECONDS_PER_MARK = 0.02
FIRST_MARK_S = 1.0  # Whisper's own bound: the first words begin within the first second, or the mark says so


@dataclass(frozen=True, slots=True)
class Segment:
    """A phrase, and when it is said, in seconds of its window; its single words if they are wanted."""

    start_s: float
    end_s: float
    text: str
    words: tuple[Word, ...] = ()


class Ear(Protocol):
    """What understands one window of sound."""

    def hear(self, samples: np.ndarray, timed: bool = False, worded: bool = False) -> list[Segment]:
        """The words in at most 30 s of mono sound at 16 kHz: one segment, or if `timed` one per phrase; or none.
        If `worded` each with the times of its words."""
        ...


class WhisperEar:
    """Whisper in torch, greedy, one window at a time."""

    def __init__(self, folder: Path, device: str, threads: int) -> None:
        import torch
        from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

        torch.set_num_threads(threads)
        self._torch = torch
        self._device = device
        model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval().to(device)
        self._features = WhisperFeatureExtractor.from_pretrained(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        settings: Any = model.generation_config
        self._begin = [settings.decoder_start_token_id, *(token for _, token in settings.forced_decoder_ids or ())]
        self._end: int = settings.eos_token_id
        self._no_speech: int = settings.no_speech_token_id
        self._no_marks: int = self._begin[-1]
        layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
        upper = [[layer, head] for layer in range(layers // 2, layers) for head in range(heads)]
        self._ordered_heads: list[list[int]] = getattr(settings, "alignment_heads", None) or upper
        self._never = torch.tensor(settings.suppress_tokens, device=device)
        self._not_first = torch.tensor(settings.begin_suppress_tokens, device=device)

    def hear(self, samples: np.ndarray, timed: bool = False, worded: bool = False) -> list[Segment]:
        torch = self._torch
        with torch.inference_mode():
            given = self._features(samples, sampling_rate=SAMPLE_RATE_HZ, return_tensors="pt")
            heard = self._model.model.encoder(given.input_features.to(self._device, torch.float32))
            tokens, log_probability, no_speech = self._decode(heard, timed)
        hardly_believed = log_probability / (len(tokens) + 1) < LOW_LOG_PROBABILITY
        if no_speech > SURELY_NO_SPEECH or (no_speech > NO_SPEECH and hardly_believed):
            return []
        phrases = list(self._phrases(tokens, len(samples) / SAMPLE_RATE_HZ))
        if not worded:
            return [Segment(*span, text) for span, text, _ in phrases]
        groups = [self._groups(said) for _, _, said in phrases]
        words = self._words(heard, [group for several in groups for group in several], samples)
        return [
            Segment(*span, text, tuple(islice(words, len(several))))
            for (span, text, _), several in zip(phrases, groups, strict=True)
        ]

    def _phrases(self, tokens: Sequence[int], length_s: float) -> Iterator[tuple[tuple[float, float], str, list[int]]]:
        """(seconds, text, tokens) of what stands between two marks, or between one and the window's border."""
        start_s, words = 0.0, list[int]()
        for token in (*tokens, self._end):
            is_mark = token > self._no_marks
            if not is_mark and token != self._end:
                words.append(token)
                continue
            at_s = min((token - self._no_marks - 1) * SECONDS_PER_MARK if is_mark else length_s, length_s)
            text = self._text(words).strip()
            if text:
                yield (round(start_s, 2), round(max(start_s, at_s), 2)), text, words
            start_s, words = at_s, []

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _groups(self, tokens: Sequence[int]) -> list[list[int]]:
        """The tokens of each word of a phrase. A sign that stands alone belongs to the word before it."""
        groups: list[list[int]] = []
        for token in tokens:
            if not groups or self._text([token]).startswith(" "):
                groups.append([])
            groups[-1].append(token)
        for place in range(len(groups) - 1, 0, -1):
            if not is_spoken(self._text(groups[place])):
                groups[place - 1] += groups.pop(place)
        return groups

    def _words(self, heard: Any, groups: list[list[int]], samples: np.ndarray) -> Iterator[Word]:
        """Every word of the window, and when it is said."""
        if not groups:
            return iter(())
        is_loud = loud_frames(samples, SAMPLE_RATE_HZ)
        with self._torch.inference_mode():
            looks = self._looks(heard, [token for group in groups for token in group], len(is_loud))
        rows, firsts, place = list[int](), list[int](), 0
        for group in groups:
            firsts.append(len(rows))
            said = [place + i for i, token in enumerate(group) if is_spoken(self._text([token]))]
            rows += said or [place]  # signs are looked up anywhere
            place += len(group)
        starts = first_frames(looks[rows])[firsts]
        texts = [self._text(group).strip() for group in groups]
        return words_at(texts, starts, is_loud, len(samples) / SAMPLE_RATE_HZ)

    def _looks(self, heard: Any, tokens: Sequence[int], frames: int) -> np.ndarray:
        """(tokens, frames) float32: how much of its attention each token had on each frame when it was chosen."""
        torch = self._torch
        attention = {layer: self._model.model.decoder.layers[layer].encoder_attn for layer, _ in self._ordered_heads}
        asked: dict[int, Any] = {}
        hooks = [
            module.q_proj.register_forward_hook(lambda _, __, made, layer=layer: asked.update({layer: made[0]}))
            for layer, module in attention.items()
        ]
        ids = torch.tensor([[*self._begin, *tokens]], device=self._device)
        try:
            self._model(encoder_outputs=heard, decoder_input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        looks: list[Any] = []
        for layer, head in self._ordered_heads:
            module = attention[layer]
            part = slice(head * module.head_dim, (head + 1) * module.head_dim)
            keys = module.k_proj(heard[0][0, :frames])[:, part]
            looks.append((asked[layer][:, part] @ keys.T * module.scaling).softmax(-1))
        return torch.stack(looks).mean(0)[len(self._begin) - 1 : -1].cpu().numpy()  # a token is chosen one row before

    def _decode(self, heard: Any, timed: bool) -> tuple[list[int], float, float]:
        """(tokens, their log-probability together, probability that there is no speech)."""
        torch = self._torch
        tokens: list[int] = []
        total, no_speech, cache, ids = 0.0, 0.0, None, self._begin[:-1] if timed else self._begin
        while len(tokens) < MAX_TOKENS:
            given = torch.tensor([ids], device=self._device)
            out = self._model(encoder_outputs=heard, decoder_input_ids=given, past_key_values=cache, use_cache=True)
            cache, scores = out.past_key_values, out.logits[0, -1]
            if not tokens:
                no_speech = float(out.logits[0, 0].softmax(-1)[self._no_speech])
                scores[self._not_first] = -torch.inf
            scores[self._never] = -torch.inf
            if timed:
                self._keep_marks_in_order(scores, tokens)
            best = int(scores.argmax())
            total += float(scores.log_softmax(-1)[best])
            if best == self._end:
                break
            tokens.append(best)
            ids = [best]
        return tokens, total, no_speech

    def _keep_marks_in_order(self, scores: Any, tokens: Sequence[int]) -> None:
        """Whisper's grammar: a phrase stands between two marks, marks never go back, the likelier kind comes."""
        torch, first_mark = self._torch, self._no_marks + 1
        scores[self._no_marks] = -torch.inf
        marks = [token for token in tokens if token >= first_mark]
        after_mark = bool(tokens) and tokens[-1] >= first_mark
        if not tokens:
            scores[:first_mark] = -torch.inf
            scores[first_mark + round(FIRST_MARK_S / SECONDS_PER_MARK) + 1 :] = -torch.inf
        elif after_mark and len(marks) % 2:  # a phrase has begun: now its words
            scores[first_mark:] = -torch.inf
        elif after_mark:  # it has ended: the next one begins, or nothing comes
            scores[: self._end] = -torch.inf
        if marks:
            is_open_end = after_mark and not len(marks) % 2
            scores[first_mark : marks[-1] + (0 if is_open_end else 1)] = -torch.inf
        likely = scores.log_softmax(-1)
        if likely[first_mark:].logsumexp(-1) > likely[:first_mark].max():
            scores[:first_mark] = -torch.inf


def is_spoken(text: str) -> bool:
    """True for a text with letters or digits."""
    return any(character.isalnum() for character in text)
