# SPDX-License-Identifier: Apache-2.0
"""Stage `aligner`: when the words of the speech are said, by Qwen3-ForcedAligner (transformers' classes).

It needs all of the audio: its feed copies each chunk, and the work begins with the last one. A thread does it, so that
the stage takes the audio of other runs meanwhile and never holds theirs up. The output is optional: a run that fails
here costs no audio.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from transformers import Qwen2Tokenizer
from transformers.models.qwen3_asr.configuration_qwen3_asr import Qwen3ASRConfig
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASRForTokenClassification
from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

from triton_omni.backends.ar.options import checkpoint_folder
from triton_omni.backends.codec.streaming import tensors_of
from triton_omni.backends.core.audio import resampled
from triton_omni.backends.core.engine import (
    EngineEvent,
    EngineFailed,
    EngineFinished,
    EngineOutput,
    OptionsError,
    Run,
    read_engine_options,
)
from triton_omni.backends.core.errors import BadRequest, ErrorInfo, StageFailed
from triton_omni.backends.core.outputs import WordsPiece, WordTime
from triton_omni.backends.core.pipeline import EngineContext

SPEECH_HZ, MODEL_HZ = 24_000, 16_000
PREFIX = "thinker."
PARTS = {
    "audio_tower.proj1.": "model.multi_modal_projector.linear_1.",
    "audio_tower.proj2.": "model.multi_modal_projector.linear_2.",
    "audio_tower.": "model.audio_tower.",
    "model.": "model.language_model.",
    "lm_head.": "score.",
}
"""Published names → transformers'; the first that fits counts."""
AUDIO_VALUES = (
    "num_mel_bins", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "d_model", "n_window",
    "n_window_infer", "output_dim", "downsample_hidden_size", "activation_function",
)  # fmt: skip
TEXT_VALUES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act",
)  # fmt: skip
"""Values that the published config and transformers' have in common."""


class AlignerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How words are aligned.

    model        folder of a Qwen3-ForcedAligner; empty: none, and requests for words are refused
    max_audio_s  longer speech gets no times
    """

    model: str = ""
    dtype: str = "float32"
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    max_audio_s: Annotated[float, msgspec.Meta(gt=0)] = 180.0


class WordAligner:
    """The network and what stands around it. Words are transformers': without punctuation, each CJK character alone."""

    _decode = Qwen3ASRProcessor.decode_forced_alignment
    _split = Qwen3ASRProcessor.split_words_for_alignment
    _tokens = Qwen3ASRProcessor._get_audio_token_length

    def __init__(self, model: Any, tokenizer: Any, facts: Mapping[str, Any], device: str) -> None:
        """`model` is a Qwen3ASRForTokenClassification, `tokenizer` the checkpoint's, `facts` its config.json."""
        self._model = model.eval().to(device)
        self._tokenizer = tokenizer
        self._device = device
        self._marker: int = facts["timestamp_token_id"]
        self._step_ms: float = facts["timestamp_segment_time"]
        self._window: int = model.config.audio_config.n_window
        self._features = Qwen3ASRFeatureExtractor(model.config.audio_config.num_mel_bins, n_window=self._window)

    def words(self, text: str) -> list[str]:
        """The words of a text that get times."""
        return self._split(text)

    @torch.inference_mode()
    def align(self, words: Sequence[str], samples: np.ndarray) -> tuple[WordTime, ...]:
        """Times of the words (at least one) in samples (n,) at 24 kHz: rising, and within them."""
        seconds = len(samples) / SPEECH_HZ
        audio = resampled(samples, SPEECH_HZ, MODEL_HZ)
        found: Any = self._features(audio, sampling_rate=MODEL_HZ, padding="longest", return_attention_mask=True)
        mask = found["attention_mask"]
        count = int(self._tokens(mask.sum(-1), self._window)[0])
        spoken = "".join(f"{word}<timestamp><timestamp>" for word in words)
        prompt = f"<|audio_start|>{'<|audio_pad|>' * count}<|audio_end|>{spoken}"
        ids = torch.tensor([self._tokenizer.encode(prompt)])
        if int((ids == self._marker).sum()) != 2 * len(words):
            raise StageFailed("the prompt's markers do not fit its words", "aligner")
        logits = self._model(
            input_ids=ids.to(self._device),
            input_features=found["input_features"].to(self._device, self._model.dtype),
            input_features_mask=mask.to(self._device),
            attention_mask=torch.ones_like(ids).to(self._device),
        ).logits.cpu()
        timed = self._decode(logits, ids, [list(words)], self._marker, self._step_ms)[0]
        return _rising([(word["text"], word["start_time"], word["end_time"]) for word in timed], seconds)


def _rising(timed: Sequence[tuple[str, float, float]], seconds: float) -> tuple[WordTime, ...]:
    """No word begins before the one before it ends, and none ends behind the audio."""
    found: list[WordTime] = []
    at_s = 0.0
    for word, start_s, end_s in timed:
        start_s = min(max(float(start_s), at_s), seconds)
        at_s = min(max(float(end_s), start_s), seconds)
        found.append(WordTime(word, round(start_s, 3), round(at_s, 3)))
    return tuple(found)


@dataclass(eq=False, slots=True)
class AlignRunState:
    """State of one run. `work` is set when all audio is here."""

    words: Sequence[str]
    chunks: list[np.ndarray] = field(default_factory=list[np.ndarray])
    samples: int = 0
    work: Future[tuple[WordTime, ...]] | None = None


class AlignerEngine:
    """core.engine.Engine over a WordAligner; None: there is none."""

    def __init__(self, stage: str, aligner: WordAligner | None, max_audio_s: float, wake: Callable[[], None]) -> None:
        self.stage = stage
        self._aligner = aligner
        self._max_samples = int(max_audio_s * SPEECH_HZ)
        self._wake = wake
        self._runs: list[Run] = []
        self._thread = ThreadPoolExecutor(1, "aligner")

    def open(self, run: Run) -> None:
        if options := run.options(self.stage):
            key = next(iter(options))
            raise BadRequest(f"unknown option '{key}'; stage '{self.stage}' has none", f"stages.{self.stage}.{key}")
        if self._aligner is None:
            raise BadRequest("this deployment has no aligner: it cannot tell the times of words", "modalities")
        run.state = AlignRunState(self._aligner.words(run.request.input))
        self._runs.append(run)

    def feed(self, run: Run, inputs: np.ndarray, last: bool) -> bool:
        """Keep samples; the last ones begin the work. What is too long is dropped at once."""
        state: AlignRunState = run.state
        state.samples += len(inputs)
        if state.samples <= self._max_samples:
            state.chunks.append(inputs)
        else:
            state.chunks.clear()
        if last:
            state.work = self._thread.submit(self._align, state)
            state.work.add_done_callback(lambda _: self._wake())
        return True

    def stop(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)
            if run.state.work is not None:
                run.state.work.cancel()

    @property
    def has_work(self) -> bool:
        return any(self._is_done(run) for run in self._runs)

    def step(self) -> Sequence[EngineEvent]:
        events: list[EngineEvent] = []
        for run in [run for run in self._runs if self._is_done(run)]:
            self._runs.remove(run)
            work: Future[tuple[WordTime, ...]] = run.state.work
            error = work.exception()
            if error is None:
                events += [EngineOutput(run, WordsPiece(work.result())), EngineFinished(run)]
            else:
                events.append(EngineFailed(run, ErrorInfo.of(error, self.stage).error()))
        return events

    def close(self) -> None:
        self._runs.clear()
        self._thread.shutdown(cancel_futures=True)

    @staticmethod
    def _is_done(run: Run) -> bool:
        work: Future[object] | None = run.state.work
        return not run.blocked and work is not None and work.done()

    def _align(self, state: AlignRunState) -> tuple[WordTime, ...]:
        """In the thread."""
        if state.samples > self._max_samples:
            most, got = self._max_samples / SPEECH_HZ, state.samples / SPEECH_HZ
            raise StageFailed(f"speech must be at most {most:g} s to get times of words (got {got:.1f} s)", self.stage)
        if not state.words or not state.samples:
            return ()
        assert self._aligner is not None, "a run is opened with one only"
        return self._aligner.align(state.words, np.concatenate(state.chunks))


def make_aligner(context: EngineContext) -> AlignerEngine:
    """The engine of stage `aligner`."""
    options = read_engine_options(context.options, AlignerOptions, context.stage)
    load = partial(load_aligner, dtype=options.dtype, device=context.device)
    aligner = load(checkpoint_folder(options.model, context.models_dir)) if options.model else None
    return AlignerEngine(context.stage, aligner, options.max_audio_s, context.wake)


def load_aligner(folder: Path, dtype: str = "float32", device: str = "cpu") -> WordAligner:
    """The aligner of a published checkpoint's folder; raises OptionsError if it is another family's."""
    facts: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        model: Any = Qwen3ASRForTokenClassification(aligner_config(facts)).float()
        model.load_state_dict({_own_name(name): tensor for name, tensor in tensors_of(folder, PREFIX).items()})
    except (KeyError, RuntimeError) as error:
        raise OptionsError(f"model '{folder}' is no forced aligner: {error}") from None
    return WordAligner(model.to(getattr(torch, dtype)), Qwen2Tokenizer.from_pretrained(folder), facts, device)


def aligner_config(facts: Mapping[str, Any]) -> Qwen3ASRConfig:
    """transformers' config from the published one; raises KeyError for what it lacks."""
    thinker = facts["thinker_config"]
    audio, text = thinker["audio_config"], thinker["text_config"]
    own = {"rope_parameters": {"rope_type": "default", "rope_theta": text["rope_theta"]}, "tie_word_embeddings": False}
    config = Qwen3ASRConfig(
        audio_config={name: audio[name] for name in AUDIO_VALUES},
        text_config={name: text[name] for name in TEXT_VALUES} | own,
        audio_token_id=thinker["audio_token_id"],
        timestamp_token_id=facts["timestamp_token_id"],
    )
    config.num_labels = thinker["classify_num"]
    return config


def _own_name(name: str) -> str:
    """transformers' name of a published tensor; raises KeyError for an unknown one."""
    for published, own in PARTS.items():
        if name.startswith(published):
            return own + name.removeprefix(published)
    raise KeyError(name)
