# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in this process, with runs added, stepped and ended by key: what all AR engines share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput

from triton_omni.backends.ar.hooks import RUN_KEY
from triton_omni.backends.ar.load import load_llm
from triton_omni.backends.ar.options import ArOptions
from triton_omni.backends.ar.params import REFUSALS, refusal_of
from triton_omni.backends.ar.upstream import scheduler_record
from triton_omni.backends.core.engine import EngineEvent, EngineFailed, EngineFinished, Run
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.pipeline import EngineContext

if TYPE_CHECKING:
    from vllm.v1.request import Request

NATURAL_ENDS = ("stop", "length", "tool_calls")


class Llm:
    """vLLM's LLMEngine with this project's refusals and ends.

    engine         vLLM's own
    max_model_len  tokens of prompt and answer together
    """

    def __init__(self, options: ArOptions, context: EngineContext, engine_args: Mapping[str, object] | None) -> None:
        self.stage = context.stage
        self.engine = load_llm(options, context, engine_args)
        self.max_model_len: int = self.engine.model_config.max_model_len
        self._honors_priority = options.scheduling_policy == "priority"

    def room_after(self, prompt_tokens: int, field: str = "messages") -> int:
        """Tokens that fit after a prompt; raises BadRequest about `field` if there is room for none."""
        room = self.max_model_len - prompt_tokens
        if room < 1:
            raise BadRequest(
                f"the prompt is {prompt_tokens} tokens long; the context of this deployment is {self.max_model_len} "
                "tokens, prompt and answer together",
                field,
            )
        return room

    def add(
        self, run: Run, key: str, prompt: TokensPrompt, params: SamplingParams, field: Callable[[], str]
    ) -> Request:
        """Hand a run to the scheduler and return the scheduler's record of it (`num_preemptions`, `mm_features`).

        Raises BadRequest, and then nothing is kept. `field` names the request's field that an unnamed refusal is about.
        """
        # vLLM serves low numbers first, our requests say high for urgent
        priority = -run.request.priority if self._honors_priority else 0
        try:
            self.engine.add_request(key, prompt, params, priority=priority)
        except REFUSALS as error:
            raise refusal_of(error, field()) from None
        return scheduler_record(self.engine, key)

    def warm_up(self) -> None:
        """Run one request with log-probabilities: on a GPU vLLM compiles their kernel at first use, 18 s in which no
        run advances."""
        params = SamplingParams(max_tokens=1, logprobs=1, extra_args={RUN_KEY: "warm-up"})
        self.engine.add_request("warm-up", TokensPrompt(prompt_token_ids=[0]), params)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def abort(self, key: str) -> None:
        self.engine.abort_request([key])

    def step(self) -> Sequence[RequestOutput]:
        """One step of vLLM: what it made of each run that advanced."""
        outputs = self.engine.step()
        assert all(isinstance(output, RequestOutput) for output in outputs), "pooling requests are never added"
        return outputs  # pyright: ignore[reportReturnType]

    def end_of(self, run: Run, reason: str | None, usage: Mapping[str, float]) -> EngineEvent:
        """The event of a run that vLLM ended: EngineFinished for a natural end, else EngineFailed."""
        if reason in NATURAL_ENDS:
            return EngineFinished(run, reason, dict(usage))
        return EngineFailed(run, StageFailed(f"vLLM ended the run: {reason or 'no reason given'}", self.stage))

    def close(self) -> None:
        self.engine.engine_core.shutdown()
