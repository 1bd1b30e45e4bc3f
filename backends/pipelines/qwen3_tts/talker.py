# SPDX-License-Identifier: Apache-2.0
"""Stage `talker`: text → frames of codes. This module decides by ids what a row is made of; the network makes the rows.

It is the entry stage: its run starts when it is opened, or for a recording's voice when stage `voice` has read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from transformers import Qwen2Tokenizer

from triton_omni.backends.ar.frames import ConditioningUpdate, FrameEngine
from triton_omni.backends.ar.options import checkpoint_folder, read_options
from triton_omni.backends.core.engine import OptionsError, Run
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_tts.adapters import VOICE_EDGE, VoiceInput
from triton_omni.backends.pipelines.qwen3_tts.checkpoint import TtsFacts, read_facts
from triton_omni.backends.pipelines.qwen3_tts.checks import (
    Recording,
    TtsSampling,
    check_facts,
    recording_of,
    talker_options,
)
from triton_omni.backends.pipelines.qwen3_tts.network import ARCHITECTURE, TtsTalkerNetwork, talker_config
from triton_omni.backends.pipelines.qwen3_tts.prompts import (
    ANSWER_END_TOKENS,
    HEADER_TOKENS,
    TURN_END_TOKENS,
    SpokenTokens,
    make_prompt,
    prompt_length,
)

SAMPLING = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "max_tokens": 2048}
"""Defaults of qwen-tts 0.1.1."""
MIN_FRAMES = 2  # as qwen-tts 0.1.1: the end of speech is not sampled before
FRAMES_PER_TOKEN, FEWEST_FRAMES = 40, 400
"""Bound of a run that never ends its speech: 3.2 s for each token of text, but 32 s are always allowed."""
SAMPLES_PER_FRAME, SAMPLE_RATE_HZ = 1920, 24_000


class TextTokenizer(Protocol):
    """The checkpoint's tokenizer, as far as it is used here."""

    def encode(self, text: str) -> list[int]: ...


def make_talker(context: EngineContext) -> FrameEngine:
    """The engine of stage `talker`."""
    folder = checkpoint_folder(read_options(context.options, context.stage).model, context.models_dir)
    talker = TtsTalker(read_facts(folder), folder)
    needed = {"hf_overrides": partial(talker_config, folder)}
    return FrameEngine(context, lambda config: talker, (ARCHITECTURE, TtsTalkerNetwork), needed)


class TtsTalker:
    """triton_omni.backends.ar.frames.FrameModel of Qwen3-TTS."""

    sampling: Mapping[str, object] = SAMPLING
    min_frames = MIN_FRAMES

    def __init__(self, facts: TtsFacts, folder: Path) -> None:
        self.facts = facts
        self.pad_token = facts.talker_config.codec_pad_id
        self.end_token = facts.talker_config.codec_eos_token_id
        self._tokenizer = cast("TextTokenizer", Qwen2Tokenizer.from_pretrained(folder))
        start, role, end = facts.im_start_token_id, facts.assistant_token_id, facts.im_end_token_id
        ids = self._tokenizer.encode("<|im_start|>assistant\n<|im_end|>")
        if len(ids) != HEADER_TOKENS + 1 or (ids[0], ids[1], ids[-1]) != (start, role, end):
            raise OptionsError(f"model '{folder}': its tokenizer does not know the ids of its config.json (got {ids})")

    def sampling_of(self, run: Run, stage: str) -> TtsSampling:
        return talker_options(run.request)

    def conditioning(self, run: Run, context_length: int) -> TtsConditioning:
        """Raises BadRequest for what this checkpoint cannot serve."""
        request, recording = run.request, recording_of(run.request)
        voice, language, per_frame = check_facts(request, self.facts)
        tokens = self.tokens(request.input, recording.transcript if recording else "", request.speech.instructions)
        whole = self.facts.tts_model_type != "base" if per_frame is None else not per_frame
        frames = _frames_of(recording) if recording is not None and recording.transcript else 0
        needed = prompt_length(tokens, frames, whole) + MIN_FRAMES
        if needed > context_length:
            raise BadRequest(
                f"the text and the shortest speech take {needed} places; the context of this deployment has "
                f"{context_length}",
                "input",
            )
        return TtsConditioning(self.facts, tokens, language, voice, whole)

    def tokens(self, text: str, transcript: str = "", instructions: str = "") -> SpokenTokens:
        """Token ids of what is said and how."""
        encode = self._tokenizer.encode
        answer = encode(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")
        said = encode(f"<|im_start|>assistant\n{transcript}<|im_end|>\n") if transcript else []
        how = encode(f"<|im_start|>user\n{instructions}<|im_end|>\n") if instructions else []
        return SpokenTokens(
            answer[:HEADER_TOKENS], answer[HEADER_TOKENS:-ANSWER_END_TOKENS], said[HEADER_TOKENS:-TURN_END_TOKENS], how
        )


def _frames_of(recording: Recording) -> int:
    """Frames that a recording takes; the last one is filled up."""
    return ceil(recording.part.length * SAMPLE_RATE_HZ / recording.part.sample_rate / SAMPLES_PER_FRAME)


class TtsConditioning:
    """triton_omni.backends.ar.frames.Conditioning of one run."""

    def __init__(self, facts: TtsFacts, tokens: SpokenTokens, language: str, voice: str, whole: bool) -> None:
        self._facts = facts
        self._tokens = tokens
        self._language = language
        self._voice = voice
        self._whole = whole
        self._started = False

    def update(self, inputs: VoiceInput | None, last: bool) -> ConditioningUpdate:
        """`inputs` None: of an entry run, or the empty end of the edge."""
        if self._started:
            return ConditioningUpdate()
        if inputs is None and self._facts.tts_model_type == "base":
            raise StageFailed("the edge ended without a voice", VOICE_EDGE)
        self._started = True
        vector, frames = (None, None) if inputs is None else (self._checked(inputs.vector), self._codes(inputs.frames))
        prompt, later = make_prompt(
            self._facts,
            self._tokens,
            language=self._language,
            voice=self._voice,
            vector=vector,
            frames=frames,
            whole=self._whole,
        )
        ceiling = max(FEWEST_FRAMES, FRAMES_PER_TOKEN * len(self._tokens.text))
        return ConditioningUpdate(prompt, len(prompt.token_ids), later, frames, ceiling)

    def _checked(self, vector: np.ndarray) -> np.ndarray:
        hidden = self._facts.talker_config.hidden_size
        if vector.shape != (hidden,) or not np.isfinite(vector).all():
            message = f"a voice's vector must be {hidden} finite numbers (got shape {list(vector.shape)})"
            raise StageFailed(message, VOICE_EDGE)
        return vector

    def _codes(self, frames: np.ndarray | None) -> np.ndarray | None:
        """Checked: on a GPU a code without an embedding would end the process."""
        if frames is None:
            return None
        predictor = self._facts.talker_config.code_predictor_config
        books = self._facts.talker_config.num_code_groups
        if frames.shape[1] != books or (frames.size and not 0 <= frames.min() <= frames.max() < predictor.vocab_size):
            message = f"a recording's codes must be {books} books of 0 to below {predictor.vocab_size}"
            raise StageFailed(message, VOICE_EDGE)
        return frames
