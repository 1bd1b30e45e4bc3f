# SPDX-License-Identifier: Apache-2.0
"""Where we reach into vLLM; with upstream_v2.py the only place. Checked against one version, refuses another.

vLLM has public seams for models and schedulers but none for rows of a step, so three classes are extended here:

    worker     every engine's is a RankWorker: it extends its model runner, and one of several ends with the first error
               in a step; an engine with hooks has a HookedWorker
    runner     every V1 runner is a SeededRunner; a HookedRunner also taps layers, writes input rows and hands over
               sampled tokens, all inside one step
    scheduler  does not schedule a run whose next input row has not arrived; sends the gate's control events to the
               runners with the step, and hands over their results

Exercised on the V1 runner of the CPU build. On CUDA the same V1 runner is pinned (environment.py); CUDA graphs see the
input rows because they are written into the runner's persistent buffer, but no GPU was at hand: untested there. Hooks
for vLLM's V2 runner, which needs a GPU, are in upstream_v2.py.
Tensor parallel: with more than one rank all runners live in processes of their own (ranks.py); control events and step
results travel on vLLM's own SchedulerOutput and ModelRunnerOutput, so hooks add no messages to a step.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import vllm
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from triton_omni.backends.ar import upstream_v2
from triton_omni.backends.ar.code_predictor import CodePredictor
from triton_omni.backends.ar.graph_check import fall_back_if_graphs_differ
from triton_omni.backends.ar.hooks import (
    CONTROL_EVENTS,
    MODEL,
    STEP_RESULT,
    TAP_LAYERS,
    Gate,
    Rows,
    Span,
    Taps,
    attach_step_result,
    is_tapped,
    run_key,
)
from triton_omni.backends.ar.ranks import die_on_error, die_with_worker, is_only_rank, tell_reason, unlink_shared_memory

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


class SeededRunner:
    """Mixed in front of the platform's V1 model runner class: seeded runs may compute their prompt in pieces on a CPU.

    vLLM draws a token also for a run whose prompt is not complete, throws it away and sets the run's generator back
    (gpu_model_runner.py, `_bookkeeping_sync`). Generators of a CPU have no offset: the call raises out of the step and
    ends the worker. Such a run draws without its own generator instead, which then needs no setting back.
    """

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        generators: dict[int, Any] = self.input_batch.generators
        incomplete = {i: generators[i] for i in generators if self.discard_request_mask.np[i]}
        for i in incomplete:
            del generators[i]
        try:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        finally:
            generators |= incomplete


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
        positions = self.rows.positions(run_key(req_state)) if self.rows is not None else None
        if positions is None:
            super()._init_mrope_positions(req_state)  # type: ignore[misc]
        else:
            req_state.mrope_positions, req_state.mrope_position_delta = positions

    def execute_model(self: Any, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        if self.rows is not None:
            self.rows.apply(getattr(scheduler_output, CONTROL_EVENTS, ()))
        return super().execute_model(scheduler_output, intermediate_tensors)  # type: ignore[misc]

    def _preprocess(self: Any, scheduler_output: Any, num_input_tokens: int, intermediate_tensors: Any = None) -> Any:
        inputs = super()._preprocess(scheduler_output, num_input_tokens, intermediate_tensors)  # type: ignore[misc]
        if self.rows is not None:
            self.rows.fill(self.spans(scheduler_output), inputs[1])
        return inputs

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if state is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        spans = self.spans(state.scheduler_output)
        if self.taps is not None and state.aux_hidden_states:
            total = spans[-1].start + spans[-1].count
            self.taps.on_forward(spans, self.input_ids.gpu[:total], [rows[:total] for rows in state.aux_hidden_states])
        request_ids = list(self.input_batch.req_ids)
        out = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self.rows is not None:
            tokens = [out.sampled_token_ids[out.req_id_to_index[request]] for request in request_ids]
            complete = [i for i, sampled in enumerate(tokens) if sampled]  # an incomplete prompt samples nothing
            if complete:
                hidden = state.sample_hidden_states[complete]
                self.rows.on_sampled([spans[i].key for i in complete], hidden, [tokens[i][0] for i in complete])
        attach_step_result(out, self.taps or self.rows)
        return out

    def spans(self: Any, scheduler_output: Any) -> list[Span]:
        """The step's rows by run, in the order of the batch."""
        spans: list[Span] = []
        start = 0
        for index, request in enumerate(self.input_batch.req_ids):
            count = scheduler_output.num_scheduled_tokens[request]
            position = int(self.input_batch.num_computed_tokens_cpu[index])
            state = self.requests[request]
            reads_prompt = is_tapped(state) and position < state.num_prompt_tokens
            spans.append(Span(run_key(state), position, start, count, reads_prompt))
            start += count
        return spans


V1_RUNNERS = ("vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.gpu_model_runner")
HOOKS: dict[str, type] = dict.fromkeys(V1_RUNNERS, HookedRunner) | {
    "vllm.v1.worker.gpu.model_runner": upstream_v2.V2HookedRunner
}
"""Hooks by the module of the platform's runner."""


def capture_frames(network: Any) -> None:
    """Capture the frames of a network's code predictor, if it has one. Of several ranks each would compare by itself,
    and all must compute the same rows: they stay eager."""
    for module in network.modules() if is_only_rank() else ():
        if isinstance(module, CodePredictor):
            module.capture()


class RankWorker(Worker):  # pyright: ignore[reportGeneralTypeIssues]
    """The platform's worker, of one rank; it never outlives the engine worker it belongs to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        die_with_worker()
        super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        with tell_reason(self.rank):
            super().init_device()
        unlink_shared_memory()
        if type(self.model_runner).__module__ in V1_RUNNERS:
            self._extend_runner(SeededRunner)

    def _extend_runner(self, mixin: type) -> None:
        runner = type(self.model_runner)
        extended = type(f"{mixin.__name__}{runner.__name__}", (mixin, runner), {"__module__": runner.__module__})
        self.model_runner.__class__ = extended  # type: ignore[assignment]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with tell_reason(self.rank):
            super().load_model(*args, **kwargs)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        if type(self.model_runner).__module__ in V1_RUNNERS:
            fall_back_if_graphs_differ(self.model_runner)
        if self.device.type == "cuda" and not self.model_config.enforce_eager:
            capture_frames(self.model_runner.get_model())
        return times

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        with die_on_error(self.rank):
            return super().execute_model(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        with die_on_error(self.rank):
            return super().sample_tokens(*args, **kwargs)


RANK_WORKER = f"{__name__}.{RankWorker.__name__}"
"""EngineArgs.worker_cls of an engine without hooks."""


class HookedWorker(RankWorker):
    """The platform's worker, with a HookedRunner."""

    def init_device(self) -> None:
        model = self.vllm_config.additional_config.get(MODEL)
        if model is not None:
            register_model(model[0], pkgutil.resolve_name(model[1]))
        super().init_device()
        runner = type(self.model_runner)
        hooks = HOOKS.get(runner.__module__)
        if hooks is None:
            raise RuntimeError(f"no hooks for vLLM's {runner.__module__}.{runner.__name__}")
        self._extend_runner(hooks)

    def attach_taps(self, taps: Taps) -> None:
        """Called in every rank. All hold the same hidden rows, so the first one's are taken."""
        if self.rank == 0:
            self.model_runner.taps = taps  # pyright: ignore[reportAttributeAccessIssue]

    def attach_rows(self, make: Callable[[Any], Rows]) -> None:
        """Called in every rank: makes its rows out of its part of the network."""
        self.model_runner.rows = make(self.model_runner.get_model())  # pyright: ignore[reportAttributeAccessIssue]


class HookedScheduler(Scheduler):
    """Does not schedule runs whose next input row is missing; they keep their cache blocks and their place."""

    gate: Gate | None = None
    on_step_result: Callable[[Any], None] | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.gate is None:
            return super().schedule(*args, **kwargs)
        for request in self.running:
            if not self.gate.ready(run_key(request), request.num_tokens - 1):
                request.next_decode_eligible_step = self.current_step + 2  # schedule() counts up first
        # a preempted run computes all its rows again, the missing one too
        held = [r for r in self.waiting if not self.gate.ready(run_key(r), r.num_tokens - 1)]
        self.waiting.remove_requests(held)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            for request in reversed(held):
                self.waiting.prepend_request(request)
        setattr(output, CONTROL_EVENTS, self.gate.control_events())
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        result = getattr(model_runner_output, STEP_RESULT, None)
        if result is not None and self.on_step_result is not None:
            self.on_step_result(result)
        return super().update_from_output(scheduler_output, model_runner_output)


def hook_arguments(tap_layers: Sequence[int] = (), model: tuple[str, type] | None = None) -> dict[str, Any]:
    """EngineArgs of an engine with hooks; `model` is an out-of-tree model and its architecture's name."""
    config: dict[str, Any] = {TAP_LAYERS: tuple(tap_layers)}
    if model is not None:
        register_model(*model)
        config[MODEL] = (model[0], f"{model[1].__module__}:{model[1].__qualname__}")
    return {
        "worker_cls": f"{__name__}.{HookedWorker.__name__}",
        "scheduler_cls": HookedScheduler,
        "additional_config": config,
        "async_scheduling": False,  # the next row depends on the token that was just sampled
    }


def register_model(architecture: str, model: type) -> None:
    """Make an out-of-tree model known; by its class, since a name would cost a process to look at it."""
    ModelRegistry.register_model(architecture, model)


def scheduler_record(llm: LLMEngine, key: str) -> Any:
    """The scheduler's own record of a run that was just added; it counts `num_preemptions`."""
    return next(request for request in _scheduler(llm).requests.values() if run_key(request) == key)


def media_features(record: Any) -> list[Any]:
    """vLLM's features of the media in a run's prompt, by position; `record` is the scheduler's."""
    return sorted(record.mm_features, key=lambda feature: feature.mm_position.offset)


def attach_taps(llm: LLMEngine, taps: Taps, on_step_result: Callable[[Any], None]) -> None:
    """Let a copy of `taps` read every step; `on_step_result` gets its results."""
    _scheduler(llm).on_step_result = on_step_result
    llm.collective_rpc("attach_taps", args=(taps,))


def attach_rows(llm: LLMEngine, make: Callable[[Any], Rows], gate: Gate) -> None:
    """Let the Rows that `make` builds on each rank's network take part in every step, and `gate` hold back runs."""
    scheduler = _scheduler(llm)
    scheduler.gate, scheduler.on_step_result = gate, gate.on_step_result
    llm.collective_rpc("attach_rows", args=(make,))


def _scheduler(llm: LLMEngine) -> Any:
    core: Any = llm.engine_core
    return core.engine_core.scheduler
