# SPDX-License-Identifier: Apache-2.0
"""Stage `voice`: a recording → the vector of its voice, and its codes where it comes with a transcript.

Opened only for requests that bring a recording. One run per step; what was made of a recording is kept, so that a voice
that is used again costs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from transformers import MimiConfig, MimiModel

from triton_omni.backends.ar.options import checkpoint_folder
from triton_omni.backends.codec.streaming import tensors_of
from triton_omni.backends.core.audio import check_samples, resampled
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import (
    EngineChunk,
    EngineEvent,
    EngineFinished,
    OptionsError,
    Run,
    read_engine_options,
)
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_tts.checkpoint import read_facts, speech_folder
from triton_omni.backends.pipelines.qwen3_tts.checks import recording_of
from triton_omni.backends.pipelines.qwen3_tts.speaker import SpeakerNetwork

SAMPLE_RATE_HZ, SAMPLES_PER_FRAME = 24_000, 1920
SILENCE = 1e-3  # -60 dB of full scale: a recording whose loudest sample is below holds no voice


class VoiceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How recordings are read.

    model        folder of the whole checkpoint, a Base one
    cache_bytes  bound of what is kept of recordings, the least recently used of which goes first
    """

    model: str
    dtype: str = "float32"
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 << 20


class VoiceReader:
    """The two networks. Everything is on one device."""

    def __init__(self, speaker: SpeakerNetwork, encoder: Any, books: int, device: str) -> None:
        """`encoder` is a MimiModel."""
        self._speaker, self._encoder = speaker.eval().to(device), encoder.eval().to(device)
        self._books = books
        self._device = device

    @torch.inference_mode()
    def vector(self, samples: np.ndarray) -> np.ndarray:
        """A voice's vector (hidden,) float32 of samples (n,) at 24 kHz."""
        return self._speaker(torch.from_numpy(samples).to(self._device)).float().cpu().numpy()

    @torch.inference_mode()
    def codes(self, samples: np.ndarray) -> np.ndarray:
        """Codes (frames, books) int16 of samples (n,) at 24 kHz; the last frame is filled up."""
        given = torch.from_numpy(samples).to(self._device)[None, None]
        found: Any = self._encoder.encode(given, num_quantizers=self._books, return_dict=True)
        frames = ceil(len(samples) / SAMPLES_PER_FRAME)
        return found.audio_codes[0, :, :frames].T.to(torch.int16).cpu().numpy().copy()


@dataclass(slots=True)
class KnownVoice:
    """What was made of a recording; `codes` None: nothing has asked for them."""

    vector: np.ndarray
    codes: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return self.vector.nbytes + (0 if self.codes is None else self.codes.nbytes)


class VoiceCache:
    """Voices by the SHA-256 of their samples, bounded in bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._voices: OrderedDict[bytes, KnownVoice] = OrderedDict()
        self.nbytes = 0

    def get(self, key: bytes) -> KnownVoice | None:
        """A voice, which is now the last to go."""
        if key in self._voices:
            self._voices.move_to_end(key)
        return self._voices.get(key)

    def put(self, key: bytes, voice: KnownVoice) -> None:
        """Keep a voice in place of an earlier one of the same key, if it fits at all."""
        self._drop(key)
        self._voices[key] = voice
        self.nbytes += voice.nbytes
        while self.nbytes > self._most_bytes:
            self._drop(next(iter(self._voices)))

    def _drop(self, key: bytes) -> None:
        voice = self._voices.pop(key, None)
        self.nbytes -= 0 if voice is None else voice.nbytes


@dataclass(frozen=True, slots=True)
class HeldRecording:
    """A run's recording: samples (n,) float32 at `rate_hz`."""

    samples: np.ndarray
    rate_hz: int
    has_transcript: bool


class VoiceEngine:
    """core.engine.Engine; an entry stage."""

    def __init__(self, stage: str, reader: VoiceReader, cache: VoiceCache) -> None:
        self.stage = stage
        self.cache = cache
        self._reader = reader
        self._runs: deque[Run] = deque()

    def open(self, run: Run) -> None:
        if options := run.options(self.stage):
            key = next(iter(options))
            raise BadRequest(f"unknown option '{key}'; stage '{self.stage}' has none", f"stages.{self.stage}.{key}")
        recording = recording_of(run.request)
        if recording is None:
            raise BadRequest("there is no recording", "messages")
        part, tensor = recording.part, run.inputs["audio"]
        samples = np.frombuffer(tensor.data, np.float32)[part.offset : part.offset + part.length].copy()
        check_samples(samples, recording.field)
        loudest = float(np.abs(samples).max())
        if loudest < SILENCE:
            raise BadRequest(f"the recording is silent (its loudest sample is {loudest:.1e})", recording.field)
        run.state = HeldRecording(samples, part.sample_rate, bool(recording.transcript))
        self._runs.append(run)

    def feed(self, run: Run, inputs: object, last: bool) -> bool:
        raise AssertionError("nothing feeds stage voice: its recording comes with the request")

    def stop(self, run: Run) -> None:
        if run in self._runs:
            self._runs.remove(run)

    @property
    def has_work(self) -> bool:
        return any(not run.blocked for run in self._runs)

    def step(self) -> Sequence[EngineEvent]:
        run = next((run for run in self._runs if not run.blocked), None)
        if run is None:
            return ()
        self._runs.remove(run)
        held: HeldRecording = run.state
        run.state = None
        voice = self._known(held)
        tensors = [Tensor.of("vector", voice.vector)]
        if held.has_transcript and voice.codes is not None:
            tensors.append(Tensor.of("frames", voice.codes))
        seconds = round(len(held.samples) / held.rate_hz, 3)
        return (EngineChunk(run, tuple(tensors)), EngineFinished(run, "stop", {"audio_input_s": seconds}))

    def close(self) -> None:
        self._runs.clear()

    def _known(self, held: HeldRecording) -> KnownVoice:
        samples = resampled(held.samples, held.rate_hz, SAMPLE_RATE_HZ)
        key = hashlib.sha256(samples.tobytes()).digest()
        voice = self.cache.get(key) or KnownVoice(self._reader.vector(samples))
        if held.has_transcript and voice.codes is None:
            voice = KnownVoice(voice.vector, self._reader.codes(samples))
        self.cache.put(key, voice)
        return voice


def make_voice(context: EngineContext) -> VoiceEngine:
    """The engine of stage `voice`."""
    options = read_engine_options(context.options, VoiceOptions, context.stage)
    folder = checkpoint_folder(options.model, context.models_dir)
    facts, dtype = read_facts(folder), getattr(torch, options.dtype)
    speaker = SpeakerNetwork(facts.speaker_encoder_config)
    if facts.tts_model_type == "base":
        _load(speaker, tensors_of(folder, "speaker_encoder."), folder)
    books = facts.talker_config.num_code_groups
    encoder = load_encoder(speech_folder(options.model, context.models_dir))
    reader = VoiceReader(speaker.to(dtype), encoder.to(dtype), books, context.device)
    return VoiceEngine(context.stage, reader, VoiceCache(options.cache_bytes))


def load_encoder(folder: Path) -> Any:
    """The codec's encoder, Mimi's, without the half that decodes."""
    facts: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["encoder_config"]
    # the model was trained on codes of an encoder whose transformer sees everything before, whatever its config says
    facts = {key: value for key, value in facts.items() if key != "model_type"}
    model = MimiModel(MimiConfig(**facts | {"sliding_window": facts["max_position_embeddings"]}))
    for half in ("upsample", "decoder_transformer", "decoder"):
        setattr(model, half, None)
    _load(model, tensors_of(folder, "encoder."), folder)
    return model


def _load(model: torch.nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise OptionsError(f"{folder}: tensors do not fit the config: {error}") from None
