# SPDX-License-Identifier: Apache-2.0
"""The frame engine: an autoregressive stage whose input rows arrive while it runs and whose every step makes a frame.

It is the AR engine's other half: vLLM schedules and computes, a RowStore beside the model runner writes each step's
input row, and the network predicts the rest of a frame in the step that sampled its first code. What rows are made of
is the pipeline's business. The engine itself holds no tensor: with several ranks the network is in other processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput

from triton_omni.backends.ar.gate import GatedRun, RowGate
from triton_omni.backends.ar.load import load_llm
from triton_omni.backends.ar.options import read_options
from triton_omni.backends.ar.params import REFUSALS, Defaults, refusal_of, vllm_params
from triton_omni.backends.ar.rows import Begin, RowStore
from triton_omni.backends.ar.sampling import stage_sampling
from triton_omni.backends.ar.upstream import attach_rows, hook_arguments, scheduled
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import EngineChunk, EngineEvent, EngineFailed, EngineFinished, Run
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.generate import Sampling
from triton_omni.backends.core.pipeline import EngineContext

RESIDUAL_STREAM = 0x5EED_0F_C0DE5
"""Tells the random numbers of residual codes from those of first codes, which vLLM draws with the same seed."""


@dataclass(slots=True)
class Taken:
    """What came of one piece of conditioning: the prompt, once, and words for later steps."""

    prompt: Any = None
    """As the network's `prompt_rows` reads it."""
    length: int = 0
    """Its rows."""
    words: Sequence[int] = ()
    positions: tuple[torch.Tensor, int] | None = None
    """M-RoPE positions of the prompt, if they are not 0, 1, 2, …"""


class Conditioning(Protocol):
    """One run's conditioning, model-specific."""

    def take(self, inputs: Any, last: bool) -> Taken:
        """What the edge's adapter made of a chunk, as the network reads it."""
        ...


class FrameModel(Protocol):
    """The model-specific half of a frame engine that needs no network.

    pad_token      stands for every prompt position; a token that can never be sampled
    end_token      sampled instead of a frame when there is nothing more to say
    sampling       what the model itself recommends
    """

    pad_token: int
    end_token: int
    sampling: Mapping[str, Any]

    def begin(self, run: Run) -> Conditioning:
        """Conditioning of a new run; raises BadRequest for what can be refused at once."""
        ...


@dataclass(eq=False, slots=True)
class Speaking:
    """A run's state, hung on `run.state`. `rows` is None until the prompt is complete."""

    run: Run
    key: str
    sampling: Sampling
    conditioning: Conditioning
    rows: GatedRun | None = None
    scheduled: Any = None
    """vLLM's record of the run, once it has started."""
    frames: int = 0


class FrameEngine:
    """core.engine.Engine that turns rows into frames: Send(codes (frames, books) int16)."""

    def __init__(
        self,
        context: EngineContext,
        make: Callable[[Any], FrameModel],
        network: tuple[str, type],
        needed: Mapping[str, Any],
    ) -> None:
        """`make` gets the checkpoint's config; `network` (a rows.Network) is the architecture's name and the class;
        `needed` are EngineArgs that it cannot do without."""
        self.stage = context.stage
        self.options = read_options(context.options, context.stage)
        fixed = {
            "enable_prompt_embeds": True,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # the checkpoint's is about another of its networks
            "enable_prefix_caching": False,  # prompts are placeholders: all look alike to the cache
        }
        self.llm = load_llm(self.options, context, hook_arguments(model=network) | fixed | dict(needed))
        self.max_model_len: int = self.llm.model_config.max_model_len
        self.model = make(self.llm.model_config.hf_config)
        self._defaults = Defaults(self.options.sampling, self.model.sampling, self.llm.model_config.get_vocab_size())
        self.gate = RowGate()
        attach_rows(self.llm, RowStore, self.gate)
        self._live: dict[str, Speaking] = {}
        self._over: list[Speaking] = []

    # --- Engine ---------------------------------------------------------------------------------------------------
    def open(self, run: Run) -> None:
        given = run.request.sampling
        sampling = stage_sampling(run.options(self.stage), Sampling(seed=given.seed), self.stage)
        self._params(sampling, self.max_model_len, "")  # refuses what is wrong with it
        run.state = Speaking(run, run.id.hex(), sampling, self.model.begin(run))

    def feed(self, run: Run, inputs: Any, last: bool) -> bool:
        live: Speaking = run.state
        taken = live.conditioning.take(inputs, last)
        if taken.prompt is not None:
            self._start(live, taken)
        if live.rows is None:
            if last:
                self._over.append(live)  # there is nothing to say
            return True
        if live.key in self._live:  # one that has said all it may leaves the rest of the words
            self.gate.say(live.key, taken.words, last)
        return True

    def stop(self, run: Run) -> None:
        live: Speaking | None = run.state
        if live is None:
            return
        if self._live.pop(live.key, None) is not None:
            self.llm.abort_request([live.key])
            self.gate.end(live.key)
        elif live in self._over:
            self._over.remove(live)

    def step(self) -> Sequence[EngineEvent]:
        events: list[EngineEvent] = [EngineFinished(live.run, "stop", {"audio_frames": 0}) for live in self._over]
        self._over.clear()
        for live in self._live.values():
            assert live.rows is not None, "a live run has its prompt"
            live.rows.paused = live.run.blocked
        outputs = self.llm.step()
        broken = [(live, live.rows.broken) for live in self._live.values() if live.rows is not None]
        for live, reason in [(live, reason) for live, reason in broken if reason]:
            self.stop(live.run)
            error = StageFailed(f"the rows of the run cannot be made: {reason}", self.stage)
            events.append(EngineFailed(live.run, error))
        for output in outputs:
            assert isinstance(output, RequestOutput), "pooling requests are never added"
            live = self._live.get(output.request_id)
            if live is not None:
                events += self._events(live, output)
        return events

    @property
    def has_work(self) -> bool:
        """Runs whose next row is missing or whose consumer is full do not count: the loop sleeps until it changes."""
        return bool(self._over) or any(self._can_go_on(live) for live in self._live.values())

    def close(self) -> None:
        self.llm.engine_core.shutdown()

    # --- inside ---------------------------------------------------------------------------------------------------
    def _can_go_on(self, live: Speaking) -> bool:
        assert live.rows is not None, "a live run has its prompt"
        live.rows.paused = live.run.blocked
        return live.rows.can_go_on

    def _start(self, live: Speaking, taken: Taken) -> None:
        room = self.max_model_len - taken.length
        if room < 1:
            raise BadRequest(
                f"the conversation needs {taken.length} positions to be spoken; this deployment takes "
                f"{self.max_model_len} of conversation and speech together",
                "messages",
            )
        params = self._params(live.sampling, room, live.key)
        prompt = TokensPrompt(prompt_token_ids=[self.model.pad_token] * taken.length)
        try:
            self.llm.add_request(live.key, prompt, params)
        except REFUSALS as error:
            raise refusal_of(error, "messages") from None
        live.scheduled = scheduled(self.llm, live.key)
        note = Begin(live.key, taken.prompt, taken.positions, _residual_seed(params))
        live.rows = self.gate.begin(note, taken.length)
        self._live[live.key] = live

    def _params(self, sampling: Sampling, room: int, key: str) -> SamplingParams:
        return vllm_params(sampling, self._defaults, room=room, key=key, end_token=self.model.end_token)

    def _events(self, live: Speaking, output: RequestOutput) -> list[EngineEvent]:
        made = output.outputs[0]
        assert live.rows is not None
        frames, live.rows.frames = live.rows.frames, []
        assert len(frames) == len(made.token_ids), "every sampled token makes a frame in its own step"
        if made.finish_reason == "length":
            frames.pop()  # as transformers has it: the frame of the last allowed token is never made
        good = [f for f, token in zip(frames, made.token_ids, strict=False) if token != self.model.end_token]
        events: list[EngineEvent] = []
        if good:
            live.frames += len(good)
            events.append(EngineChunk(live.run, (Tensor.of("codes", np.stack(good)),)))
        if output.finished:
            del self._live[live.key]
            self.gate.end(live.key)
            events.append(self._end(live, made.finish_reason or ""))
        return events

    def _end(self, live: Speaking, reason: str) -> EngineEvent:
        if reason in ("stop", "length"):
            usage = {"audio_frames": live.frames, "preemptions": live.scheduled.num_preemptions}
            return EngineFinished(live.run, reason, usage)
        return EngineFailed(live.run, StageFailed(f"vLLM ended the run: {reason or 'no reason given'}", self.stage))


def _residual_seed(params: SamplingParams) -> int | None:
    """Of the random numbers of a run's residual codes, the same in all ranks; None for a greedy run."""
    if params.temperature == 0:
        return None
    return random.getrandbits(63) if params.seed is None else params.seed ^ RESIDUAL_STREAM
