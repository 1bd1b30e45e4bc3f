# SPDX-License-Identifier: Apache-2.0
"""The autoregressive engine: vLLM's own engine, stepped in the worker's loop.

Continuous batching, paged KV cache, chunked prefill and prefix caching are vLLM's; runs join and leave between two
steps. This module knows no model: a pipeline's PromptBuilder makes the prompts, and its RunFeed the chunks for consumer
stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Protocol, cast

import torch
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput

from triton_omni.backends.ar.completions import prompt_field
from triton_omni.backends.ar.grammars import cancel_compiling, is_compiling, when_compiled
from triton_omni.backends.ar.llm import Llm
from triton_omni.backends.ar.options import read_options
from triton_omni.backends.ar.params import ParamDefaults, is_refused, vllm_params
from triton_omni.backends.ar.sampling import stage_sampling
from triton_omni.backends.ar.schemas import check_schema
from triton_omni.backends.ar.taps import TappedRows
from triton_omni.backends.ar.tools import ANY, CallScanner, check_tools, forced_calls
from triton_omni.backends.core.engine import EngineChunk, EngineEvent, EngineFailed, EngineOutput, Run
from triton_omni.backends.core.errors import BadRequest, ErrorInfo, StageFailed
from triton_omni.backends.core.generate import Sampling
from triton_omni.backends.core.outputs import Candidate, FunctionCall, TextPiece, TokenLogprob, TranscriptPiece
from triton_omni.backends.core.pipeline import EngineContext

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from triton_omni.backends.ar.chat_prompts import ChatTokenizer

log = logging.getLogger("triton_omni.ar")

TEXT_EVERY_S = 0.001
"""Shortest time between two pieces of text of a run, for each other run of the engine: what pieces cost the
processes between here and the client does not grow with the number of runs. A run that is alone sends each token."""
TEXT_AT_MOST_S = 0.05
"""Bound on it: text that comes in steps of this length still reads as a stream."""


@dataclass(frozen=True, slots=True)
class LlmPrompt:
    """What the model reads.

    token_ids     with one placeholder token for each media item
    media         vLLM's multi_modal_data
    processor     options of the model's own media processor
    audio_tokens  how many of the ids are transcripts of audio parts
    """

    token_ids: list[int]
    media: Mapping[str, object] = field(default_factory=dict[str, object])
    processor: Mapping[str, object] = field(default_factory=dict[str, object])
    audio_tokens: int = 0


class PromptBuilder(Protocol):
    """The model-specific half of a request."""

    def check(self, run: Run) -> None:
        """Raise BadRequest for what can be refused before upstream stages have run."""
        ...

    def build(self, run: Run, transcripts: Sequence[str]) -> LlmPrompt:
        """The prompt; `transcripts` replace the audio parts, in order, if a transcriber stage feeds this one."""
        ...


class RunFeed(Protocol):
    """Makes one run's chunks for the consumer stages. Made by the pipeline for each run that has a consumer."""

    def on_tapped(self, positions: Sequence[int], rows: torch.Tensor) -> None:
        """Take hidden rows (positions, hidden) of prompt positions, if the engine has taps; see taps.TappedRows."""
        ...

    def chunks(self, output: RequestOutput) -> Iterable[EngineChunk]:
        """The chunks of one step's output."""
        ...


class TextFeed:
    """The RunFeed of consumers that read text: each chunk is the step's new text."""

    def __init__(self, state: ArRunState) -> None:
        self._run = state.run

    def on_tapped(self, positions: Sequence[int], rows: torch.Tensor) -> None:
        """Text needs no hidden rows."""

    def chunks(self, output: RequestOutput) -> Iterable[EngineChunk]:
        text = output.outputs[0].text
        return (EngineChunk(self._run, piece=TextPiece(text)),) if text else ()


@dataclass(eq=False, slots=True)
class ArRunState:
    """State of one run, kept on `run.state`.

    waiting_for    upstream edges that have not ended
    scanner        takes function calls out of the text, if the request has tools
    transcripts    by number of the audio part
    scheduled      vLLM's record of the run, set when it starts
    held_text      waits to be sent with the next token's; due at `text_due_s`
    held_ids       tokens whose text is not out: `held_text`, part of a character, or of a possible stop string
    """

    run: Run
    key: str
    sampling: Sampling
    waiting_for: int
    scanner: CallScanner | None = None
    feed: RunFeed | None = None
    transcripts: dict[int, str] = field(default_factory=dict[int, str])
    scheduled: Request = field(init=False, repr=False)
    prompt_tokens: int = 0
    prompt_audio_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    output_sent: bool = False
    text_due_s: float = 0.0
    held_text: str = ""
    held_ids: list[int] = field(default_factory=list[int])
    held_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])

    @property
    def grammar_field(self) -> str:
        """The request's field that a grammar of its text comes from; empty if it may be any text."""
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


class ArEngine:
    """core.engine.Engine on one vLLM engine in this process."""

    def __init__(
        self,
        context: EngineContext,
        prompts: Callable[[ChatTokenizer], PromptBuilder],
        feed: Callable[[ArRunState], RunFeed] = TextFeed,
        engine_args: Mapping[str, object] | None = None,
    ) -> None:
        """`prompts` makes the prompt builder from the checkpoint's tokenizer; `engine_args` are vLLM EngineArgs that
        the pipeline requires."""
        self.stage = context.stage
        self.options = read_options(context.options, context.stage)
        self.llm = Llm(self.options, context, engine_args)
        self.max_model_len = self.llm.max_model_len
        self.runs: dict[str, ArRunState] = {}
        self._defaults = ParamDefaults.of(self.llm.engine, self.options)
        self._feed = feed
        self._wake = context.wake
        self._prompts = prompts(cast("ChatTokenizer", self.llm.engine.renderer.get_tokenizer()))
        self.llm.warm_up()

    def on_tapped(self, tapped: Sequence[TappedRows]) -> None:
        """Hand hidden rows to their runs' feeds. Rows that a preempted run computes again were sent before."""
        for key, positions, rows in tapped:
            state = self.runs.get(key)
            if state is not None and state.feed is not None and not state.completion_tokens:
                state.feed.on_tapped(positions, rows)

    # --- Engine ---------------------------------------------------------------------------------------------------
    def open(self, run: Run) -> None:
        sampling = stage_sampling(run.options(self.stage), run.request.sampling, self.stage)
        if sampling.json_schema is not None:
            check_schema(sampling.json_schema, "sampling.json_schema")
        check_tools(run.request)
        self._prompts.check(run)
        state = ArRunState(run, run.id.hex(), sampling, len(run.upstream), CallScanner() if run.request.tools else None)
        if run.feeds:
            state.feed = self._feed(state)
        if state.waiting_for:
            self._params(state, self.max_model_len)  # refuse bad sampling before the upstream stages run
        else:
            self._start(state)
        run.state = state

    def feed(self, run: Run, inputs: TranscriptPiece | None, last: bool) -> bool:
        """Take the transcript of an audio part; the run starts when every upstream edge has ended."""
        state: ArRunState = run.state
        if inputs is not None:
            state.transcripts[inputs.part] = inputs.text
        if last:
            state.waiting_for -= 1
            if not state.waiting_for:
                self._start(state)
        return True

    def stop(self, run: Run) -> None:
        state: ArRunState | None = run.state
        if state is not None and self.runs.pop(state.key, None) is not None:
            self.llm.abort(state.key)
            cancel_compiling(state.scheduled)

    def step(self) -> Sequence[EngineEvent]:
        events: list[EngineEvent] = []
        for output in self.llm.step():
            state = self.runs.get(output.request_id)
            if state is not None:
                events += self._contained_events(state, output)
        return events

    @property
    def has_work(self) -> bool:
        """Runs whose grammar is being compiled do not count: the loop is woken when that is done."""
        return any(not is_compiling(state.scheduled) for state in self.runs.values())

    def close(self) -> None:
        self.llm.close()

    # --- start ----------------------------------------------------------------------------------------------------
    def _start(self, state: ArRunState) -> None:
        """Hand the run to vLLM's scheduler; raises BadRequest, and then nothing is kept."""
        missing = [i for i in range(len(state.transcripts)) if i not in state.transcripts]
        if missing:
            raise StageFailed(f"no transcript of audio part {missing[0]}", self.stage)
        transcripts = [state.transcripts[i] for i in range(len(state.transcripts))]
        prompt = self._prompts.build(state.run, transcripts)
        state.prompt_tokens, state.prompt_audio_tokens = len(prompt.token_ids), prompt.audio_tokens
        params = self._params(state, self.llm.room_after(state.prompt_tokens, prompt_field(state.run.request)))
        inputs = TokensPrompt(prompt_token_ids=prompt.token_ids)
        if prompt.media:
            inputs["multi_modal_data"] = prompt.media
            inputs["mm_processor_kwargs"] = dict(prompt.processor)
            # hidden rows of media positions come from computing them, not from the cache
            params.skip_reading_prefix_cache = state.run.feeds
        state.scheduled = self.llm.add(state.run, state.key, inputs, params, lambda: self._refused_field(params, state))
        self.runs[state.key] = state
        when_compiled(state.scheduled, self._wake)

    def _params(self, state: ArRunState, room: int) -> SamplingParams:
        grammar = forced_calls(state.run.request.tools, state.run.request.tool_choice)
        return vllm_params(state.sampling, self._defaults, room=room, key=state.key, grammar=grammar)

    def _refused_field(self, params: SamplingParams, state: ArRunState) -> str:
        """The field that a refusal without a name is about: parts that vLLM accepts on their own are in order."""
        plain = params.clone()
        plain.structured_outputs = None
        if is_refused(self.llm.engine, plain):
            return "sampling"
        return state.grammar_field if is_refused(self.llm.engine, params) else prompt_field(state.run.request)

    # --- outputs --------------------------------------------------------------------------------------------------
    def _contained_events(self, state: ArRunState, output: RequestOutput) -> list[EngineEvent]:
        """Events of one run's output. The step computed all runs, so an error of our code here ends this run only."""
        try:
            return self._events(state, output)
        except Exception as error:  # the engine-loop border
            request_id = state.run.request_id
            log.exception("an answer failed: request %s", request_id, extra={"request_id": request_id})
            self.stop(state.run)
            return [EngineFailed(state.run, ErrorInfo.of(error, self.stage).error())]

    def _events(self, state: ArRunState, output: RequestOutput) -> list[EngineEvent]:
        completion = output.outputs[0]
        state.held_ids += completion.token_ids
        state.held_logprobs += _logprobs(completion)
        state.completion_tokens += len(completion.token_ids)
        state.cached_tokens = max(state.cached_tokens, output.num_cached_tokens or 0)
        if output.prompt_token_ids is not None:
            state.prompt_tokens = len(output.prompt_token_ids)  # media placeholders have been expanded
        text, calls = completion.text, []
        if state.scanner is not None:
            text, calls = state.scanner.feed(completion.text, output.finished)
        state.held_text += text
        events: list[EngineEvent] = []
        now_s = monotonic()
        is_due = calls or output.finished or now_s >= state.text_due_s
        if is_due and (state.held_text or calls or (state.held_ids and output.finished)):
            events.append(self._output(state, calls))
            state.text_due_s = now_s + min(TEXT_AT_MOST_S, TEXT_EVERY_S * (len(self.runs) - 1))
        if state.feed is not None:
            events += state.feed.chunks(output)
        if output.finished:
            del self.runs[state.key]
            events.append(self._end(state, completion.finish_reason))
        return events

    def _output(self, state: ArRunState, calls: list[FunctionCall]) -> EngineOutput:
        first = 0 if state.output_sent else state.prompt_tokens
        piece = TextPiece(state.held_text, tuple(state.held_ids), tuple(state.held_logprobs), tuple(calls), first)
        state.output_sent = True
        state.held_text, state.held_ids, state.held_logprobs = "", [], []
        return EngineOutput(state.run, piece)

    def _end(self, state: ArRunState, reason: str | None) -> EngineEvent:
        if reason == "stop" and state.scanner is not None and state.scanner.calls_seen:
            reason = "tool_calls"
        if reason not in ("stop", "length", "tool_calls") and state.grammar_field:
            # grammars are compiled beside the steps; a failed one surfaces as an end without a natural reason
            return EngineFailed(
                state.run, BadRequest("the schema cannot be turned into a grammar", state.grammar_field)
            )
        return self.llm.end_of(state.run, reason, state.usage())


def _logprobs(completion: CompletionOutput) -> list[TokenLogprob]:
    """One entry per token: its id, text, log-probability and the most probable alternatives, best first."""
    entries: list[TokenLogprob] = []
    for token_id, candidates in zip(completion.token_ids, completion.logprobs or (), strict=False):
        assert candidates is not None, "None stands for a prompt's first token only"
        ranked = sorted(candidates.items(), key=lambda item: item[1].rank or 0)
        top = tuple(Candidate(i, c.decoded_token or "", c.logprob) for i, c in ranked)
        chosen = next(candidate for candidate in top if candidate.token_id == token_id)
        entries.append(TokenLogprob(token_id, chosen.token, chosen.logprob, top))
    return entries
