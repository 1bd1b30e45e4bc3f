# SPDX-License-Identifier: Apache-2.0
"""Where we reach into vLLM; with upstream_v2.py the only place. Checked against one version, refuses another.

vLLM has public seams for models and schedulers but none for rows of a step, so three classes are extended here:

    worker     makes its model runner a HookedRunner
    runner     taps layers, writes input rows, hands over sampled tokens, all inside one step
    scheduler  does not schedule a run whose next input row has not arrived

Exercised on the V1 runner of the CPU build. On CUDA the same V1 runner is pinned (environment.py); CUDA graphs see the
input rows because they are written into the runner's persistent buffer, but no GPU was at hand: untested there. Hooks
for vLLM's V2 runner, which needs a GPU, are in upstream_v2.py.
Tensor parallel: taps and rows live in this process, so hooks ask for tensor_parallel_size 1; with more ranks rank 0
would have to forward them (every rank computes the same rows), which is not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import vllm
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from backends.ar import upstream_v2
from backends.ar.hooks import TAP_LAYERS, Rows, Span, Taps, run_key

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

CHECKED_VERSION = "0.32."
assert vllm.__version__.startswith(CHECKED_VERSION), (
    f"backends/ar/upstream.py was checked against vLLM {CHECKED_VERSION}*, this is {vllm.__version__}"
)


class HookedRunner:
    """Mixed in front of the platform's V1 model runner class."""

    taps: Taps | None = None
    rows: Rows | None = None

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        layers = self.vllm_config.additional_config.get(TAP_LAYERS, ())
        if layers:  # before CUDA graphs are captured
            self.model.set_aux_hidden_state_layers(tuple(layers))
            self.use_aux_hidden_state_outputs = True

    def _init_mrope_positions(self: Any, req_state: Any) -> None:
        given = self.rows.positions(run_key(req_state)) if self.rows is not None else None
        if given is None:
            super()._init_mrope_positions(req_state)  # type: ignore[misc]
        else:
            req_state.mrope_positions, req_state.mrope_position_delta = given

    def _preprocess(self: Any, scheduler_output: Any, num_input_tokens: int, intermediate_tensors: Any = None) -> Any:
        found = super()._preprocess(scheduler_output, num_input_tokens, intermediate_tensors)  # type: ignore[misc]
        if self.rows is not None:
            self.rows.fill(self.spans(scheduler_output), found[1])
        return found

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if state is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        spans = self.spans(state.scheduler_output)
        if self.taps is not None and state.aux_hidden_states:
            total = spans[-1].start + spans[-1].count
            self.taps.tapped(spans, self.input_ids.gpu[:total], [rows[:total] for rows in state.aux_hidden_states])
        request_ids = list(self.input_batch.req_ids)
        out = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self.rows is not None:
            tokens = [out.sampled_token_ids[out.req_id_to_index[request]] for request in request_ids]
            took = [i for i, sampled in enumerate(tokens) if sampled]  # a prompt that is not complete samples nothing
            if took:
                hidden = state.sample_hidden_states[took]
                self.rows.sampled([spans[i].key for i in took], hidden, [tokens[i][0] for i in took])
        return out

    def features(self: Any, key: str) -> list[Any]:
        """vLLM's features of the media in a run's prompt."""
        return next(state for state in self.requests.values() if run_key(state) == key).mm_features

    def spans(self: Any, scheduler_output: Any) -> list[Span]:
        """The step's rows by run, in the order of the batch."""
        found: list[Span] = []
        start = 0
        for place, request in enumerate(self.input_batch.req_ids):
            count = scheduler_output.num_scheduled_tokens[request]
            position = int(self.input_batch.num_computed_tokens_cpu[place])
            found.append(Span(run_key(self.requests[request]), position, start, count))
            start += count
        return found


RUNNERS: dict[str, type] = {
    "vllm.v1.worker.cpu_model_runner": HookedRunner,
    "vllm.v1.worker.gpu_model_runner": HookedRunner,
    "vllm.v1.worker.gpu.model_runner": upstream_v2.HookedRunner,
}
"""Hooks by the module of the platform's runner."""


class HookedWorker(Worker):  # pyright: ignore[reportGeneralTypeIssues]
    """The platform's worker, with a HookedRunner."""

    def init_device(self) -> None:
        super().init_device()
        kind = type(self.model_runner)
        hooks = RUNNERS.get(kind.__module__)
        if hooks is None:
            raise RuntimeError(f"there are no hooks for vLLM's {kind.__module__}.{kind.__name__}")
        self.model_runner.__class__ = type(f"Hooked{kind.__name__}", (hooks, kind), {})  # type: ignore[assignment]


class GatedScheduler(Scheduler):
    """Leaves out runs whose next input row is missing; they keep their blocks and their place."""

    rows: Rows | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.rows is None:
            return super().schedule(*args, **kwargs)
        for request in self.running:
            if not self.rows.ready(run_key(request), request.num_tokens - 1):
                request.next_decode_eligible_step = self.current_step + 2  # schedule() counts up first
        # a preempted run computes all its rows again, the missing one too
        held = [r for r in self.waiting if not self.rows.ready(run_key(r), r.num_tokens - 1)]
        self.waiting.remove_requests(held)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            for request in reversed(held):
                self.waiting.prepend_request(request)


def hook_arguments(tap_layers: Sequence[int] = (), gated: bool = False) -> dict[str, Any]:
    """EngineArgs of an engine with hooks."""
    found: dict[str, Any] = {
        "worker_cls": f"{__name__}.{HookedWorker.__name__}",
        "additional_config": {TAP_LAYERS: tuple(tap_layers)},
        "async_scheduling": False,  # the next row depends on the token that was just sampled
    }
    return found | {"scheduler_cls": GatedScheduler} if gated else found


def runner(llm: LLMEngine) -> Any:
    """The model runner of an engine that lives in this process."""
    executor: Any = llm.model_executor
    return executor.driver_worker.worker.model_runner


def media_features(llm: LLMEngine, key: str) -> list[Any]:
    """vLLM's features of the media in a run's prompt, by position; asked in the step that answered it first."""
    return sorted(runner(llm).features(key), key=lambda feature: feature.mm_position.offset)


def scheduled(llm: LLMEngine, key: str) -> Any:
    """The scheduler's own record of a run that was just added; it counts `num_preemptions`."""
    core: Any = llm.engine_core
    return next(request for request in core.engine_core.scheduler.requests.values() if run_key(request) == key)


def attach_taps(llm: LLMEngine, taps: Taps) -> None:
    """From now on `taps` sees every step."""
    runner(llm).taps = taps


def attach_rows(llm: LLMEngine, rows: Rows) -> None:
    """From now on `rows` writes and reads every step, and holds back runs that are not ready."""
    core: Any = llm.engine_core
    core.engine_core.scheduler.rows = rows
    runner(llm).rows = rows


def register_model(architecture: str, model: type) -> None:
    """Make an out-of-tree model known; by its class, since a name would cost a process to look at it."""
    ModelRegistry.register_model(architecture, model)
