# SPDX-License-Identifier: Apache-2.0
"""The frame engine: an autoregressive stage whose input rows arrive while it runs and whose every step makes a frame.

vLLM schedules and computes, a RowStore beside the model runner writes each step's input row, and the network predicts
the rest of a frame in the step that sampled its first code. The pipeline decides what rows are made of. The engine
holds no tensor of the network: with several ranks the network is in other processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput

from triton_omni.backends.ar.gate import GatedRun, RowGate
from triton_omni.backends.ar.llm import Llm
from triton_omni.backends.ar.options import read_options
from triton_omni.backends.ar.params import ParamDefaults, vllm_params
from triton_omni.backends.ar.rows import BeginRows, RowStore
from triton_omni.backends.ar.upstream import attach_rows, hook_arguments
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import EngineChunk, EngineEvent, EngineFailed, EngineFinished, Run
from triton_omni.backends.core.errors import StageFailed
from triton_omni.backends.core.generate import Sampling
from triton_omni.backends.core.pipeline import EngineContext

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm.v1.request import Request

RESIDUAL_STREAM = 0x5EED_0F_C0DE5
"""Separates the random numbers of residual codes from those of first codes, which vLLM draws with the same seed."""


@dataclass(slots=True)
class ConditioningUpdate:
    """What one chunk of conditioning adds to a run.

    prompt         once, as the network's `prompt_rows` reads it
    prompt_length  rows of the prompt
    text_tokens    text token ids, one for each later step
    context        codes (frames, books) int16 that the consumer's audio goes on from; sent in front of the first frame
    max_frames     bound of the run's frames, beside that of its sampling
    positions      M-RoPE positions of the prompt (3, rows) and the offset of later ones; None: 0, 1, 2, …
    """

    prompt: object = None
    prompt_length: int = 0
    text_tokens: Sequence[int] = ()
    context: np.ndarray | None = None
    max_frames: int | None = None
    positions: tuple[torch.Tensor, int] | None = None


class Conditioning(Protocol):
    """One run's conditioning, model-specific."""

    def update(self, inputs: Any, last: bool) -> ConditioningUpdate:
        """Read what the edge's adapter made of a chunk. An entry run is asked once, with None: its prompt is in its
        request."""
        ...


class FrameModel(Protocol):
    """The model-specific half of a frame engine that needs no network.

    pad_token      token id of every prompt position; one that is never sampled
    end_token      sampled instead of a frame at the end of speech
    min_frames     frames before `end_token` may be sampled
    sampling       the model's own sampling defaults
    """

    pad_token: int
    end_token: int
    min_frames: int
    sampling: Mapping[str, object]

    def sampling_of(self, run: Run, stage: str) -> Sampling:
        """What a request says of this stage's sampling; raises BadRequest naming the key."""
        ...

    def conditioning(self, run: Run, context_length: int) -> Conditioning:
        """Conditioning of a new run; raises BadRequest for what can be refused at once. `context_length` is that of
        the deployment: rows of prompt and frames together."""
        ...


@dataclass(eq=False, slots=True)
class FrameRunState:
    """State of one run, kept on `run.state`. `rows` is None until the prompt is complete; `scheduled` is vLLM's record
    of the run, set when it starts."""

    run: Run
    key: str
    sampling: Sampling
    conditioning: Conditioning
    rows: GatedRun | None = None
    scheduled: Request = field(init=False, repr=False)
    frames: int = 0


class FrameEngine:
    """core.engine.Engine that turns rows into frames: EngineChunk(codes (frames, books) int16)."""

    def __init__(
        self,
        context: EngineContext,
        make: Callable[[PreTrainedConfig], FrameModel],
        network: tuple[str, type],
        engine_args: Mapping[str, object],
    ) -> None:
        """`make` gets the checkpoint's config; `network` (a rows.Network) is the architecture's name and the class;
        `engine_args` are vLLM EngineArgs that the pipeline requires."""
        self.stage = context.stage
        self.options = read_options(context.options, context.stage)
        fixed = {
            "enable_prompt_embeds": True,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # the checkpoint's describes another of its networks
            "enable_prefix_caching": False,  # prompts are placeholders that all look alike to the cache
        }
        self.llm = Llm(self.options, context, hook_arguments(model=network) | fixed | dict(engine_args))
        config = self.llm.engine.model_config
        self.model = make(config.hf_config)
        self._defaults = ParamDefaults(self.options.sampling, self.model.sampling, config.get_vocab_size())
        self.gate = RowGate()
        attach_rows(self.llm.engine, RowStore, self.gate)
        self._runs: dict[str, FrameRunState] = {}
        self._silent: list[FrameRunState] = []
        """Runs whose upstream ended before a prompt was complete."""
        self._context: list[EngineChunk] = []
        """Chunks of started runs that no step has returned yet."""

    # --- Engine ---------------------------------------------------------------------------------------------------
    def open(self, run: Run) -> None:
        sampling = self.model.sampling_of(run, self.stage)
        self._params(sampling, self.llm.max_model_len, "")  # refuses bad sampling before upstream stages run
        state = FrameRunState(run, run.id.hex(), sampling, self.model.conditioning(run, self.llm.max_model_len))
        if not run.upstream:
            self._advance(state, state.conditioning.update(None, True), True)
        run.state = state

    def feed(self, run: Run, inputs: object, last: bool) -> bool:
        state: FrameRunState = run.state
        self._advance(state, state.conditioning.update(inputs, last), last)
        return True

    def stop(self, run: Run) -> None:
        state: FrameRunState | None = run.state
        if state is None:
            return
        if self._runs.pop(state.key, None) is not None:
            self._context = [chunk for chunk in self._context if chunk.run is not run]
            self.llm.abort(state.key)
            self.gate.end(state.key)
        elif state in self._silent:
            self._silent.remove(state)

    def step(self) -> Sequence[EngineEvent]:
        events: list[EngineEvent] = [EngineFinished(state.run, "stop", {"audio_frames": 0}) for state in self._silent]
        events += self._context
        self._silent.clear()
        self._context.clear()
        for state in self._runs.values():
            _gated(state).paused = state.run.blocked
        outputs = self.llm.step()
        for state in [state for state in self._runs.values() if _gated(state).failure]:
            self.stop(state.run)
            error = StageFailed(f"the input rows cannot be made: {_gated(state).failure}", self.stage)
            events.append(EngineFailed(state.run, error))
        for output in outputs:
            state = self._runs.get(output.request_id)
            if state is not None:
                events += self._events(state, output)
        return events

    @property
    def has_work(self) -> bool:
        """Runs whose next row is missing or whose consumer is full do not count: the loop sleeps until it changes."""
        return bool(self._silent or self._context) or any(self._can_step(state) for state in self._runs.values())

    def close(self) -> None:
        self.llm.close()

    # --- inside ---------------------------------------------------------------------------------------------------
    def _can_step(self, state: FrameRunState) -> bool:
        gated = _gated(state)
        gated.paused = state.run.blocked
        return gated.can_step

    def _advance(self, state: FrameRunState, update: ConditioningUpdate, last: bool) -> None:
        if update.prompt is not None:
            self._start(state, update)
        if state.rows is None:
            if last:
                self._silent.append(state)
        elif state.key in self._runs:  # a run that has reached max_tokens ignores the rest of the text
            self.gate.push_tokens(state.key, update.text_tokens, last)

    def _start(self, state: FrameRunState, update: ConditioningUpdate) -> None:
        room = self.llm.room_after(update.prompt_length)
        params = self._params(state.sampling, min(room, update.max_frames or room), state.key)
        prompt = TokensPrompt(prompt_token_ids=[self.model.pad_token] * update.prompt_length)
        state.scheduled = self.llm.add(state.run, state.key, prompt, params, lambda: "messages")
        event = BeginRows(state.key, update.prompt, update.positions, _residual_seed(params))
        state.rows = self.gate.begin(event, update.prompt_length)
        self._runs[state.key] = state
        if update.context is not None:
            self._context.append(EngineChunk(state.run, (Tensor.of("context", update.context),)))

    def _params(self, sampling: Sampling, room: int, key: str) -> SamplingParams:
        end, least = self.model.end_token, self.model.min_frames
        return vllm_params(sampling, self._defaults, room=room, key=key, end_token=end, min_tokens=least)

    def _events(self, state: FrameRunState, output: RequestOutput) -> list[EngineEvent]:
        completion = output.outputs[0]
        gated = _gated(state)
        frames, gated.frames = gated.frames, []
        assert len(frames) == len(completion.token_ids), "every sampled token makes a frame in its own step"
        if completion.finish_reason == "length":
            frames.pop()  # as transformers has it: the frame of the last allowed token is never made
        end_token = self.model.end_token
        kept = [f for f, token in zip(frames, completion.token_ids, strict=False) if token != end_token]
        events: list[EngineEvent] = []
        if kept:
            state.frames += len(kept)
            events.append(EngineChunk(state.run, (Tensor.of("codes", np.stack(kept)),)))
        if output.finished:
            del self._runs[state.key]
            self.gate.end(state.key)
            usage = {"audio_frames": state.frames, "preemptions": state.scheduled.num_preemptions}
            events.append(self.llm.end_of(state.run, completion.finish_reason, usage))
        return events


def _gated(state: FrameRunState) -> GatedRun:
    assert state.rows is not None, "a run in the scheduler has its prompt"
    return state.rows


def _residual_seed(params: SamplingParams) -> int | None:
    """Seed of a run's residual codes, the same in all ranks; None for a greedy run."""
    if params.temperature == 0:
        return None
    return random.getrandbits(63) if params.seed is None else params.seed ^ RESIDUAL_STREAM
