# SPDX-License-Identifier: Apache-2.0
"""Stage `talker`: the thinker's prompt and answer → frames of codes, while the thinker is still generating.

This module decides by ids what a row is made of; the network makes the rows (network.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoePreTrainedModelForConditionalGeneration as OmniModel,
)

from triton_omni.backends.ar.frames import ConditioningUpdate, FrameEngine
from triton_omni.backends.ar.sampling import stage_sampling
from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.errors import StageFailed
from triton_omni.backends.core.generate import Sampling
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_omni.adapters import EDGE, TalkerInput
from triton_omni.backends.pipelines.qwen3_omni.checkpoints import speaking_config
from triton_omni.backends.pipelines.qwen3_omni.checks import DEFAULT_VOICE, named_voice
from triton_omni.backends.pipelines.qwen3_omni.network import ARCHITECTURE, PromptParts, TalkerNetwork, talker_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HEADER_TOKENS = 3  # <|im_start|> assistant \n: read, never spoken
SAMPLING = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "max_tokens": 4096}
"""transformers' defaults for the talker."""


def make_talker(context: EngineContext) -> FrameEngine:
    """The engine of stage `talker`."""
    speaking_config(context)
    return FrameEngine(context, Talker, (ARCHITECTURE, TalkerNetwork), {"hf_overrides": talker_config})


class Talker:
    """triton_omni.backends.ar.frames.FrameModel of Qwen3-Omni."""

    sampling: Mapping[str, object] = SAMPLING
    min_frames = 0

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config
        self.speakers: dict[str, int] = {name.lower(): code for name, code in config.speaker_id.items()}
        self.pad_token: int = config.codec_pad_id
        self.end_token: int = config.codec_eos_token_id
        self.text_end_token: int = config.tts_eos_token_id
        self._rope: Any = RopeIndex(config)
        self.media_ids = frozenset((config.audio_token_id, config.image_token_id, config.video_token_id))

    def sampling_of(self, run: Run, stage: str) -> Sampling:
        """The request's `sampling` is the thinker's, but for the seed."""
        return stage_sampling(run.options(stage), Sampling(seed=run.request.sampling.seed), stage)

    def conditioning(self, run: Run, context_length: int) -> TalkerConditioning:
        return TalkerConditioning(self, named_voice(run.request.speech.voice or DEFAULT_VOICE, self.speakers))

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise StageFailed for ids without an embedding; on a GPU such an id would end the process."""
        vocabulary = self.config.text_vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
            raise StageFailed(f"token ids must be from 0 to below {vocabulary}", EDGE)

    def prompt_parts(self, prompt: TalkerInput, first_token: int, speaker: int) -> PromptParts:
        """All user turns, and the header of the answer, which ends with the answer's first token."""
        ids, names = prompt.prompt_ids, self.config
        header = self._header(ids)
        positions = self.user_positions(ids)
        codes = [names.codec_nothink_id, names.codec_think_bos_id, names.codec_think_eos_id]
        media_positions, media = self._media(prompt, positions)
        return PromptParts(
            [ids[position] for position in positions]
            + ids[header : header + HEADER_TOKENS]
            + [names.tts_pad_token_id] * 4
            + [names.tts_bos_token_id, first_token],
            [*codes, speaker, names.codec_pad_id, names.codec_bos_id],
            media_positions,
            media,
        )

    def mrope_positions(self, prompt: TalkerInput, length: int) -> tuple[torch.Tensor, int] | None:
        """Positions (3, length) of the prompt's rows if it has images or video; audio alone counts like text."""
        shapes = prompt.shapes
        if not shapes or not (shapes["image_grids"] or shapes["video_grids"]):
            return None
        ids = [prompt.prompt_ids[position] for position in self.user_positions(prompt.prompt_ids)]
        ids += [self.config.tts_pad_token_id] * (length - len(ids))
        positions, offset = self._rope.get_rope_index(
            torch.tensor([ids]),
            _tensor(shapes["image_grids"]),
            _tensor(shapes["video_grids"]),
            torch.ones(1, length, dtype=torch.long),
            False,  # also for audio inside videos: transformers tells the thinker only where it is
            _tensor(shapes["audio_lengths"]),
            _tensor(shapes["video_steps_s"]),
        )
        return positions[:, 0].to(torch.int64), int(offset)

    def answer_prefix(self, prompt: TalkerInput) -> list[int]:
        """Tokens of the prompt that already belong to the answer (a template may begin it)."""
        return prompt.prompt_ids[self._header(prompt.prompt_ids) + HEADER_TOKENS :]

    def _header(self, ids: Sequence[int]) -> int:
        """Position of the answer's header: the last <|im_start|> assistant."""
        start, role = self.config.im_start_token_id, self.config.assistant_token_id
        for position in range(len(ids) - 2, -1, -1):
            if ids[position] == start and ids[position + 1] == role:
                return position
        raise StageFailed("the prompt has no assistant turn", EDGE)

    def user_positions(self, ids: Sequence[int]) -> list[int]:
        """Positions of the user turns; earlier system and assistant turns are not read."""
        positions: list[int] = []
        role = ids[1] if len(ids) > 1 else -1  # as transformers reads tokens before the first <|im_start|>
        for position, token in enumerate(ids):
            if token == self.config.im_start_token_id:
                role = ids[position + 1] if position + 1 < len(ids) else token
            if role == self.config.user_token_id:
                positions.append(position)
        return positions

    def _media(self, prompt: TalkerInput, positions: Sequence[int]) -> tuple[list[int], torch.Tensor | None]:
        """Indexes into `positions` that are media's, and the hidden rows for them."""
        ids = prompt.prompt_ids
        media = [k for k, position in enumerate(positions) if ids[position] in self.media_ids]
        if not media:
            return [], None
        all_positions = [position for position, token in enumerate(ids) if token in self.media_ids]
        shape = (len(all_positions), self.config.thinker_hidden_size)
        if prompt.media is None or tuple(prompt.media.shape) != shape:
            raise StageFailed("hidden rows of media positions are missing", EDGE)
        if not prompt.media.isfinite().all():
            raise StageFailed("hidden rows of media positions are not finite", EDGE)
        row_of = {position: k for k, position in enumerate(all_positions)}
        return media, prompt.media[[row_of[positions[k]] for k in media]]


def _tensor(values: Sequence[object]) -> torch.Tensor | None:
    return torch.tensor(values) if values else None


class RopeIndex:
    """transformers' rule for positions of media, without the network it is a method of."""

    get_rope_index = OmniModel.get_rope_index
    get_llm_pos_ids_for_vision = OmniModel.get_llm_pos_ids_for_vision
    get_chunked_index = OmniModel.get_chunked_index

    def __init__(self, config: PreTrainedConfig) -> None:
        self.spatial_merge_size: int = config.spatial_merge_size
        names = ("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id")
        self.config = SimpleNamespace(
            **{name: getattr(config, name) for name in (*names, "audio_start_token_id", "position_id_per_seconds")},
            audio_config=SimpleNamespace(n_window=config.audio_n_window),
        )


class TalkerConditioning:
    """triton_omni.backends.ar.frames.Conditioning of one run."""

    def __init__(self, talker: Talker, speaker: int) -> None:
        self._talker = talker
        self._speaker = speaker
        self._prompt: TalkerInput | None = None
        self._started = False

    def update(self, inputs: TalkerInput, last: bool) -> ConditioningUpdate:
        self._talker.check_ids(inputs.prompt_ids)
        self._talker.check_ids(inputs.token_ids)
        tokens = list(inputs.token_ids)
        if inputs.prompt_ids:
            self._prompt = inputs
            tokens = self._talker.answer_prefix(inputs) + tokens
        update = ConditioningUpdate()
        if tokens and not self._started:
            if self._prompt is None:
                raise StageFailed("text tokens came before 'prompt_ids'", EDGE)
            self._started = True
            update.prompt = parts = self._talker.prompt_parts(self._prompt, tokens.pop(0), self._speaker)
            update.prompt_length = len(parts.token_ids)
            update.positions = self._talker.mrope_positions(self._prompt, update.prompt_length)
        update.text_tokens = [*tokens, self._talker.text_end_token] if last else tokens
        return update
