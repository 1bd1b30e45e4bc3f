# SPDX-License-Identifier: Apache-2.0
"""The autoregressive engine: vLLM's own engine, stepped in the worker's loop.

Continuous batching, paged KV cache, chunked prefill and prefix caching are vLLM's; runs join and leave between two
steps. This module knows no model: what a request's prompt looks like comes from a PromptBuilder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput

from triton_omni.backends.ar.grammars import cancel_compiling, is_compiling, when_compiled
from triton_omni.backends.ar.load import load_llm
from triton_omni.backends.ar.options import read_options
from triton_omni.backends.ar.params import REFUSALS, Defaults, is_refused, refusal_of, vllm_params
from triton_omni.backends.ar.sampling import check_max_tokens, stage_sampling
from triton_omni.backends.ar.schemas import check_schema
from triton_omni.backends.ar.tools import ANY, CallScanner, check_tools, forced_calls
from triton_omni.backends.ar.upstream import scheduled
from triton_omni.backends.core.engine import EngineChunk, EngineEvent, EngineFailed, EngineFinished, EngineOutput, Run
from triton_omni.backends.core.errors import BadRequest, ErrorInfo, OmniError, StageFailed
from triton_omni.backends.core.generate import Sampling
from triton_omni.backends.core.pipeline import EngineContext

log = logging.getLogger("triton_omni.ar")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads.

    `media` is vLLM's multi_modal_data, with one placeholder token per item in the ids, `processor` options for the
    model's own processor of media. `audio_tokens` of the ids stand for sounds as a transcriber heard them.
    """

    token_ids: list[int]
    media: Mapping[str, Any] = field(default_factory=dict[str, Any])
    processor: Mapping[str, Any] = field(default_factory=dict[str, Any])
    audio_tokens: int = 0


class PromptBuilder(Protocol):
    """The model-specific half of a request."""

    def check(self, run: Run) -> None:
        """Raise BadRequest for what can be refused before upstream stages have worked."""
        ...

    def build(self, run: Run, transcripts: Sequence[str]) -> Prompt:
        """The prompt; `transcripts` stand for the audio parts, in order, if a transcriber stage feeds this one."""
        ...


@dataclass(eq=False, slots=True)
class Live:
    """A run's state, hung on `run.state`. `waiting_for` counts upstream edges that have not ended."""

    run: Run
    key: str
    sampling: Sampling
    waiting_for: int
    calls: CallScanner | None = None
    """Takes function calls out of the text, if the request brings tools."""
    transcripts: dict[int, str] = field(default_factory=dict[int, str])
    scheduled: Any = None
    """vLLM's record of the run, once it has started."""
    prompt_tokens: int = 0
    prompt_audio_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    held_ids: list[int] = field(default_factory=list[int])
    """Tokens whose text has not come out yet: part of a character, or of what may become a stop string."""
    held_logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    in_call: bool = False
    """The last token belonged to a function call; kept by a pipeline's feed."""
    hidden: dict[int, Any] = field(default_factory=dict[int, Any])
    """Hidden rows by position, kept by a pipeline's taps for its feed."""

    @property
    def grammar_field(self) -> str:
        """The field of the request that a grammar of its text comes from; "" if it may be any text."""
        if self.sampling.json_schema is not None:
            return "sampling.json_schema"
        return "" if self.run.request.tool_choice == ANY else "tools"

    def usage(self) -> dict[str, float]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_audio_tokens": self.prompt_audio_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.scheduled.num_preemptions,
        }


Feed = Callable[[Live, RequestOutput], Iterable[EngineChunk]]
"""Makes the chunks for the consumer stages from what one step made of a run."""


def text_feed(live: Live, output: RequestOutput) -> Iterable[EngineChunk]:
    """The new text, if there is any."""
    text = output.outputs[0].text
    return (EngineChunk(live.run, meta={"text": text}),) if text else ()


class ArEngine:
    """core.engine.Engine on one vLLM LLMEngine in this process."""

    def __init__(
        self,
        context: EngineContext,
        prompts: Callable[[Any], PromptBuilder],
        feed: Feed | None = None,
        needed: Mapping[str, Any] | None = None,
    ) -> None:
        """`prompts` makes the prompt builder from the checkpoint's tokenizer; `feed` makes the chunks for consumers,
        text if it is not given; `needed` are EngineArgs that the model cannot do without."""
        self.stage = context.stage
        self.options = read_options(context.options, context.stage)
        self.llm = load_llm(self.options, context, needed)
        self.max_model_len: int = self.llm.model_config.max_model_len
        self._defaults = Defaults.of(self.llm, self.options)
        self._feed = feed or text_feed
        self._wake = context.wake
        self._prompts = prompts(self.llm.renderer.get_tokenizer())
        self.live: dict[str, Live] = {}

    # --- Engine ---------------------------------------------------------------------------------------------------
    def open(self, run: Run) -> None:
        sampling = stage_sampling(run.options(self.stage), run.request.sampling, self.stage)
        check_max_tokens(sampling, self.max_model_len)
        if sampling.json_schema is not None:
            check_schema(sampling.json_schema, "sampling.json_schema")
        check_tools(run.request)
        self._prompts.check(run)
        live = Live(run, run.id.hex(), sampling, len(run.upstream), CallScanner() if run.request.tools else None)
        if live.waiting_for:
            self._params(live, self.max_model_len)  # refuse bad sampling before the upstream stages work
        else:
            self._start(live)
        run.state = live

    def feed(self, run: Run, inputs: Any, last: bool) -> bool:
        """Take {"index": audio part, "text": transcript}; the run starts when every upstream edge has ended."""
        live: Live = run.state
        if inputs:
            live.transcripts[inputs["index"]] = inputs["text"]
        if last:
            live.waiting_for -= 1
            if not live.waiting_for:
                self._start(live)
        return True

    def stop(self, run: Run) -> None:
        live: Live | None = run.state
        if live is not None and self.live.pop(live.key, None) is not None:
            self.llm.abort_request([live.key])
            cancel_compiling(live.scheduled)

    def step(self) -> Sequence[EngineEvent]:
        events: list[EngineEvent] = []
        for output in self.llm.step():
            assert isinstance(output, RequestOutput), "pooling requests are never added"
            live = self.live.get(output.request_id)
            if live is not None:
                events += self._made_of(live, output)
        return events

    @property
    def has_work(self) -> bool:
        """Runs whose grammar is being compiled do not count: the loop is woken when that is done."""
        return any(not is_compiling(live.scheduled) for live in self.live.values())

    def close(self) -> None:
        self.llm.engine_core.shutdown()

    # --- start ----------------------------------------------------------------------------------------------------
    def _start(self, live: Live) -> None:
        """Hand the run to vLLM's scheduler; raises BadRequest, and then nothing is kept."""
        missing = [i for i in range(len(live.transcripts)) if i not in live.transcripts]
        if missing:
            raise StageFailed(f"there is no transcript of audio part {missing[0]}", self.stage)
        transcripts = [live.transcripts[i] for i in range(len(live.transcripts))]
        prompt = self._prompts.build(live.run, transcripts)
        live.prompt_tokens, live.prompt_audio_tokens = len(prompt.token_ids), prompt.audio_tokens
        room = self.max_model_len - live.prompt_tokens
        if room < 1:
            raise BadRequest(
                f"the messages are {live.prompt_tokens} tokens long; this deployment takes {self.max_model_len} "
                "tokens of messages and answer together",
                "messages",
            )
        params = self._params(live, room)
        inputs = TokensPrompt(prompt_token_ids=prompt.token_ids)
        if prompt.media:
            inputs["multi_modal_data"] = prompt.media
            inputs["mm_processor_kwargs"] = dict(prompt.processor)
            # hidden rows of media positions come from computing them, never out of the cache
            params.skip_reading_prefix_cache = live.run.feeds
        honours = self.options.scheduling_policy == "priority"
        try:
            # vLLM serves low numbers first, our requests say high for urgent
            self.llm.add_request(live.key, inputs, params, priority=-live.run.request.priority if honours else 0)
        except REFUSALS as error:
            raise refusal_of(error, self._at_fault(params, live)) from None
        live.scheduled = scheduled(self.llm, live.key)
        self.live[live.key] = live
        when_compiled(live.scheduled, self._wake)

    def _params(self, live: Live, room: int) -> SamplingParams:
        grammar = forced_calls(live.run.request.tools, live.run.request.tool_choice)
        return vllm_params(live.sampling, self._defaults, room=room, key=live.key, grammar=grammar)

    def _at_fault(self, params: SamplingParams, live: Live) -> str:
        """The field that a refusal without a name is about: what vLLM does not refuse alone is in order."""
        plain = params.clone()
        plain.structured_outputs = None
        if is_refused(self.llm, plain):
            return "sampling"
        return live.grammar_field if is_refused(self.llm, params) else "messages"

    # --- what came out --------------------------------------------------------------------------------------------
    def _made_of(self, live: Live, output: RequestOutput) -> list[EngineEvent]:
        """What a step made of a run. The step was everyone's, so what our code does over it ends this run alone."""
        try:
            return self._events(live, output)
        except Exception as error:  # the engine-loop border: a bug over one answer must not end the others
            request_id = live.run.request_id
            log.exception("an answer failed: request %s", request_id, extra={"request_id": request_id})
            self.stop(live.run)
            return [EngineFailed(live.run, ErrorInfo.of(error, self.stage).error())]

    def _events(self, live: Live, output: RequestOutput) -> list[EngineEvent]:
        made = output.outputs[0]
        live.held_ids += made.token_ids
        live.held_logprobs += _logprobs(made)
        live.completion_tokens += len(made.token_ids)
        live.cached_tokens = max(live.cached_tokens, output.num_cached_tokens or 0)
        if output.prompt_token_ids is not None:
            live.prompt_tokens = len(output.prompt_token_ids)  # media placeholders have been expanded
        events: list[EngineEvent] = []
        text, calls = (made.text, []) if live.calls is None else live.calls.feed(made.text, output.finished)
        if text or calls or (output.finished and live.held_ids):
            events.append(self._output(live, text, calls))
        if live.run.feeds:
            events += self._feed(live, output)
        if output.finished:
            del self.live[live.key]
            events.append(self._end(live, made.finish_reason or ""))
        return events

    def _output(self, live: Live, text: str, calls: list[dict[str, str]]) -> EngineOutput:
        meta: dict[str, Any] = {"text": text, "token_ids": live.held_ids}
        if calls:
            meta["tool_calls"] = calls
        if live.held_logprobs:
            meta["logprobs"] = live.held_logprobs
        live.held_ids, live.held_logprobs = [], []
        return EngineOutput(live.run, "text", meta=meta)

    def _end(self, live: Live, reason: str) -> EngineEvent:
        if reason == "stop" and live.calls is not None and live.calls.found:
            reason = "tool_calls"
        if reason in ("stop", "length", "tool_calls"):
            return EngineFinished(live.run, reason, live.usage())
        if live.grammar_field:  # a grammar is compiled beside the steps; this is how it fails
            error: OmniError = BadRequest("the schema cannot be turned into a grammar", live.grammar_field)
        else:
            error = StageFailed(f"vLLM ended the run: {reason or 'no reason given'}", self.stage)
        return EngineFailed(live.run, error)


def _logprobs(made: CompletionOutput) -> list[dict[str, Any]]:
    """One entry per token: its id, text, log-probability and the most probable alternatives, best first."""
    entries: list[dict[str, Any]] = []
    for token_id, candidates in zip(made.token_ids, made.logprobs or (), strict=False):
        assert candidates is not None, "None stands for a prompt's first token only"
        ranked = sorted(candidates.items(), key=lambda item: item[1].rank or 0)
        top = [{"token_id": i, "token": c.decoded_token or "", "logprob": c.logprob} for i, c in ranked]
        chosen = next(entry for entry in top if entry["token_id"] == token_id)
        entries.append(chosen | {"top": top})
    return entries
