# SPDX-License-Identifier: Apache-2.0
"""Stage `talker`: what the thinker reads and writes → frames of codes, while the thinker still writes.

What a row is made of is decided here, by ids; the network makes the rows (network.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoePreTrainedModelForConditionalGeneration as OmniModel,
)

from triton_omni.backends.ar.frames import FrameEngine, Taken
from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_omni.adapters import Piece
from triton_omni.backends.pipelines.qwen3_omni.checkpoints import speaking_config
from triton_omni.backends.pipelines.qwen3_omni.network import ARCHITECTURE, PromptParts, TalkerNetwork, talker_config

HEADER_TOKENS = 3  # <|im_start|> assistant \n: read, never spoken
DEFAULT_VOICE = "Ethan"  # transformers' default
SAMPLING = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "max_tokens": 4096}
"""transformers' defaults for the talker."""


def make_talker(context: EngineContext) -> FrameEngine:
    """The engine of stage `talker`."""
    speaking_config(context)
    return FrameEngine(context, Talker, (ARCHITECTURE, TalkerNetwork), {"hf_overrides": talker_config})


class Talker:
    """triton_omni.backends.ar.frames.FrameModel of Qwen3-Omni."""

    sampling: Mapping[str, Any] = SAMPLING

    def __init__(self, config: Any) -> None:
        self.config = config
        self.speakers: dict[str, int] = {name.lower(): code for name, code in config.speaker_id.items()}
        self.pad_token: int = config.codec_pad_id
        self.end_token: int = config.codec_eos_token_id
        self.end_word: int = config.tts_eos_token_id
        self._rope: Any = RopeIndex(config)
        self.media_ids = frozenset((config.audio_token_id, config.image_token_id, config.video_token_id))

    def begin(self, run: Run) -> Conversation:
        name = (run.request.speech.voice or DEFAULT_VOICE).lower()
        if name not in self.speakers:
            raise BadRequest(
                f"unknown voice '{run.request.speech.voice}'; available: {', '.join(sorted(self.speakers))}",
                "speech.voice",
            )
        return Conversation(self, self.speakers[name])

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise StageFailed for words that have no embedding: on a GPU they would take the process along."""
        known = self.config.text_vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < known):
            raise StageFailed(f"token ids must be from 0 to below {known}", "thinker->talker")

    def parts(self, prompt: Piece, first_word: int, speaker: int) -> PromptParts:
        """Everything users said, and the header of the answer that ends in its first word."""
        ids, names = prompt.prompt_ids, self.config
        header = self._header(ids)
        places = self.user_places(ids)
        codes = [names.codec_nothink_id, names.codec_think_bos_id, names.codec_think_eos_id]
        media_places, media = self._media(prompt, places)
        return PromptParts(
            [ids[place] for place in places]
            + ids[header : header + HEADER_TOKENS]
            + [names.tts_pad_token_id] * 4
            + [names.tts_bos_token_id, first_word],
            [*codes, speaker, names.codec_pad_id, names.codec_bos_id],
            media_places,
            media,
        )

    def positions(self, prompt: Piece, length: int) -> tuple[torch.Tensor, int] | None:
        """Positions (3, length) of the prompt's rows if it shows pictures; sounds alone count like words."""
        shapes = prompt.shapes
        if not shapes.get("image_grids") and not shapes.get("video_grids"):
            return None
        ids = [prompt.prompt_ids[place] for place in self.user_places(prompt.prompt_ids)]
        ids += [self.config.tts_pad_token_id] * (length - len(ids))
        found, offset = self._rope.get_rope_index(
            torch.tensor([ids]),
            torch.tensor(shapes["image_grids"]) if shapes["image_grids"] else None,
            torch.tensor(shapes["video_grids"]) if shapes["video_grids"] else None,
            torch.ones(1, length, dtype=torch.long),
            False,  # also for sounds inside videos: transformers tells the thinker alone where they are
            torch.tensor(shapes["audio_lengths"]) if shapes["audio_lengths"] else None,
            torch.tensor(shapes["video_steps_s"]) if shapes["video_steps_s"] else None,
        )
        return found[:, 0].to(torch.int64), int(offset)

    def spoken(self, prompt: Piece) -> list[int]:
        """Tokens of the prompt that already belong to the answer (a template may begin it)."""
        return prompt.prompt_ids[self._header(prompt.prompt_ids) + HEADER_TOKENS :]

    def _header(self, ids: Sequence[int]) -> int:
        """Where the header of the answer begins: the last <|im_start|> assistant."""
        start, role = self.config.im_start_token_id, self.config.assistant_token_id
        for place in range(len(ids) - 2, -1, -1):
            if ids[place] == start and ids[place + 1] == role:
                return place
        raise StageFailed("the prompt has no assistant turn to speak", "thinker->talker")

    def user_places(self, ids: Sequence[int]) -> list[int]:
        """Positions of the users' turns; what system and assistant said before is not read."""
        places: list[int] = []
        role = ids[1] if len(ids) > 1 else -1  # as transformers reads tokens before the first <|im_start|>
        for place, token in enumerate(ids):
            if token == self.config.im_start_token_id:
                role = ids[place + 1] if place + 1 < len(ids) else token
            if role == self.config.user_token_id:
                places.append(place)
        return places

    def _media(self, prompt: Piece, places: Sequence[int]) -> tuple[list[int], np.ndarray | None]:
        """Which of `places` are media's, and their hidden rows."""
        ids = prompt.prompt_ids
        media = [k for k, place in enumerate(places) if ids[place] in self.media_ids]
        if not media:
            return [], None
        everywhere = [place for place, token in enumerate(ids) if token in self.media_ids]
        wanted = (len(everywhere), self.config.thinker_hidden_size)
        if prompt.media is None or prompt.media.shape != wanted:
            raise StageFailed("hidden rows of media positions are missing", "thinker->talker")
        if not np.isfinite(prompt.media).all():
            raise StageFailed("hidden rows of media positions are no numbers", "thinker->talker")
        at = {place: k for k, place in enumerate(everywhere)}
        return media, prompt.media[[at[places[k]] for k in media]]


class RopeIndex:
    """transformers' rule for positions of media, without the network it is a method of."""

    get_rope_index = OmniModel.get_rope_index
    get_llm_pos_ids_for_vision = OmniModel.get_llm_pos_ids_for_vision
    get_chunked_index = OmniModel.get_chunked_index

    def __init__(self, config: Any) -> None:
        self.spatial_merge_size: int = config.spatial_merge_size
        names = ("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id")
        self.config = SimpleNamespace(
            **{name: getattr(config, name) for name in (*names, "audio_start_token_id", "position_id_per_seconds")},
            audio_config=SimpleNamespace(n_window=config.audio_n_window),
        )


class Conversation:
    """triton_omni.backends.ar.frames.Conditioning of one run."""

    def __init__(self, talker: Talker, speaker: int) -> None:
        self._talker = talker
        self._speaker = speaker
        self._prompt: Piece | None = None
        self._started = False

    def take(self, inputs: Piece, last: bool) -> Taken:
        self._talker.check_ids(inputs.prompt_ids)
        self._talker.check_ids(inputs.token_ids)
        words = list(inputs.token_ids)
        if inputs.prompt_ids:
            self._prompt = inputs
            words = self._talker.spoken(inputs) + words
        taken = Taken()
        if words and not self._started:
            if self._prompt is None:
                raise StageFailed("words came before the prompt", "thinker->talker")
            self._started = True
            taken.prompt = parts = self._talker.parts(self._prompt, words.pop(0), self._speaker)
            taken.length = len(parts.token_ids)
            taken.positions = self._talker.positions(self._prompt, taken.length)
        taken.words = [*words, self._talker.end_word] if last else words
        return taken
