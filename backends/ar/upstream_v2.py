# SPDX-License-Identifier: Apache-2.0
"""The hooks of upstream.py for vLLM's V2 model runner. UNTESTED: that runner needs a GPU, and none was at hand.

tests/reference/test_ar_upstream_v2.py checks that what is overridden and read here exists in the installed vLLM, and
what the hooks do on a runner made for the test. To try it on a GPU set `runner: v2` in a stage's `engine` section, or
run tests/reference/test_ar_omni*.py with VLLM_USE_V2_MODEL_RUNNER=1 on one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from triton_omni.backends.ar.hooks import (
    CONTROL_EVENTS,
    TAP_LAYERS,
    Rows,
    Span,
    Taps,
    attach_step_result,
    is_tapped,
    run_key,
)


class V2HookedRunner:
    """Mixed in front of the V2 model runner class."""

    taps: Taps | None = None
    rows: Rows | None = None
    keys: dict[str, str]
    """vLLM's request id → our key of the run"""
    tapped: dict[str, int]
    """vLLM's ids of requests whose prompt's rows the taps read → length of the prompt"""

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        self.keys, self.tapped = {}, {}
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        layers = self.vllm_config.additional_config.get(TAP_LAYERS, ())
        if layers:  # before CUDA graphs are captured
            self.model.set_aux_hidden_state_layers(tuple(layers))
            self.use_aux_hidden_state_outputs = True
        kind = type(self.model_state)
        self.model_state.__class__ = type(f"Hooked{kind.__name__}", (HookedModelState, kind), {})
        self.model_state.runner = self

    def add_requests(self: Any, scheduler_output: Any) -> None:
        self.keys |= {new.req_id: run_key(new) for new in scheduler_output.scheduled_new_reqs}
        tapped = filter(is_tapped, scheduler_output.scheduled_new_reqs)
        self.tapped |= {new.req_id: len(new.prompt_token_ids) for new in tapped}
        if self.rows is not None:
            self.rows.apply(getattr(scheduler_output, CONTROL_EVENTS, ()))
        super().add_requests(scheduler_output)  # type: ignore[misc]

    def _remove_request(self: Any, req_id: str) -> bool:
        removed = super()._remove_request(req_id)  # type: ignore[misc]
        if removed:
            del self.keys[req_id]
            self.tapped.pop(req_id, None)
        return removed

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if self.taps is not None and state is not None and state.aux_hidden_states:
            total = state.input_batch.num_tokens
            layers = [rows[:total] for rows in state.aux_hidden_states]
            self.taps.on_forward(self.spans(state.input_batch), state.input_batch.input_ids[:total], layers)
        out = super().sample_tokens(grammar_output)  # type: ignore[misc]
        output = getattr(out, "model_runner_output", out)  # an AsyncOutput, which still waits for its copies
        attach_step_result(output, self.taps or self.rows)
        return out

    def sample(self: Any, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        sampled = super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]
        if self.rows is not None:
            output, counts, _ = sampled
            complete = [i for i, count in enumerate(counts.tolist()) if count]  # an incomplete prompt samples nothing
            if complete:
                tokens = output.sampled_token_ids[complete, 0].tolist()
                keys = [self.keys[input_batch.req_ids[i]] for i in complete]
                self.rows.on_sampled(keys, hidden_states[input_batch.logits_indices[complete]], tokens)
        return sampled

    def spans(self: Any, input_batch: Any) -> list[Span]:
        """The step's rows by run, in the order of the batch."""
        starts, positions = input_batch.query_start_loc_np, input_batch.num_computed_tokens_np
        return [
            Span(
                self.keys[request],
                int(positions[i]),
                int(starts[i]),
                int(starts[i + 1] - starts[i]),
                int(positions[i]) < self.tapped.get(request, 0),
            )
            for i, request in enumerate(input_batch.req_ids)
        ]


class HookedModelState:
    """Mixed in front of the class of the V2 runner's model state."""

    runner: Any

    def add_request(self: Any, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        rows: Rows | None = self.runner.rows
        positions = None if rows is None else rows.positions(run_key(new_req_data))
        if positions is not None:
            ids = new_req_data.prefill_token_ids
            known, offset = positions
            model = SimpleNamespace(
                get_mrope_input_positions=lambda ids, _: (_extended(known, offset, len(ids)), offset)
            )
            self.rope_state.init_prefill_positions(req_index, model, ids, [])

    def prepare_inputs_embeds(self: Any, scheduled_encoder_inputs: Any, input_batch: Any, req_states: Any) -> Any:
        rows = super().prepare_inputs_embeds(scheduled_encoder_inputs, input_batch, req_states)  # type: ignore[misc]
        if self.runner.rows is not None:
            self.runner.rows.fill(self.runner.spans(input_batch), rows)
        return rows


def _extended(positions: torch.Tensor, offset: int, length: int) -> torch.Tensor:
    """Positions (3, length): a run that was preempted computes its answer again as part of the prompt."""
    known = positions.shape[1]
    later = torch.arange(known, length, dtype=positions.dtype) + offset
    return torch.cat([positions, later.expand(3, -1)], 1)
