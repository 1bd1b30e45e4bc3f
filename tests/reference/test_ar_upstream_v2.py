# SPDX-License-Identifier: Apache-2.0
"""Hooks for vLLM's V2 runner: what they hold on to exists, and what they do on a runner made for the test."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace

import numpy as np
import pytest

from tests.kit.ar_worker import become_ar_worker

become_ar_worker()
torch = pytest.importorskip("torch", reason="needs the engine environment (make setup)")


def new(request, key):
    return SimpleNamespace(
        req_id=request,
        sampling_params=SimpleNamespace(extra_args={"omni_run": key}, skip_reading_prefix_cache=key == "A"),
        prompt_token_ids=[0] * 3,
        prefill_token_ids=[0] * 5,
    )


class State:
    """As much of vLLM's model state as the hooks touch."""

    def __init__(self):
        self.positions = {}
        self.rope_state = SimpleNamespace(init_prefill_positions=self.init)

    def init(self, index, model, ids, features):
        self.positions[index] = model.get_mrope_input_positions(ids, features)

    def add_request(self, index, data):
        pass

    def prepare_inputs_embeds(self, encoder, batch, states):
        return torch.zeros(batch.num_tokens, 2)


class Runner:
    """As much of vLLM's V2 runner: request a has a prompt of three tokens, b is decoding at position 7."""

    def __init__(self):
        self.vllm_config = SimpleNamespace(additional_config={"omni_tap_layers": (3,)})
        self.model_state = State()
        self.layers = ()
        self.model = SimpleNamespace(set_aux_hidden_state_layers=self.set_layers)
        self.batch = SimpleNamespace(
            req_ids=["a", "b"],
            num_tokens=4,
            input_ids=torch.arange(4),
            query_start_loc_np=np.array([0, 3, 4]),
            num_computed_tokens_np=np.array([0, 7]),
            logits_indices=torch.tensor([2, 3]),
        )

    def set_layers(self, layers):
        self.layers = layers

    def load_model(self):
        pass

    def add_requests(self, output):
        for index, data in enumerate(output.scheduled_new_reqs):
            self.model_state.add_request(index, data)

    def _remove_request(self, request):
        return request in ("a", "b")

    def sample(self, hidden, batch, grammar):
        return SimpleNamespace(sampled_token_ids=torch.tensor([[11], [12]])), torch.tensor([0, 1]), None

    def sample_tokens(self, grammar):
        self.sample(torch.arange(8.0).view(4, 2), self.batch, grammar)
        return SimpleNamespace(model_runner_output=SimpleNamespace())


class Seen:
    """triton_omni.backends.ar.hooks.Taps and Rows that keep what they are given."""

    def __init__(self):
        self.events = []

    def apply(self, events):
        self.events += events

    def step_result(self):
        return "result"

    def on_forward(self, spans, token_ids, layers):
        self.taps = [dataclasses.astuple(span) for span in spans], token_ids.tolist(), layers[0].shape

    def positions(self, key):
        return (torch.arange(3).expand(3, -1) * 2, 4) if key == "A" else None

    def fill(self, spans, rows):
        for span in spans:
            rows[span.start : span.start + span.count] = span.position + 1

    def on_sampled(self, keys, hidden, tokens):
        self.tokens = keys, hidden.tolist(), tokens


@pytest.fixture
def runner():
    from triton_omni.backends.ar.upstream_v2 import V2HookedRunner

    hooked = type("Hooked", (V2HookedRunner, Runner), {})()
    hooked.load_model()
    hooked.taps = hooked.rows = Seen()
    hooked.add_requests(
        SimpleNamespace(scheduled_new_reqs=[new("a", "A"), new("b", "B")], omni_control_events=["event"])
    )
    return hooked


def test_layers_are_tapped_by_run(runner):
    assert runner.layers == (3,) and runner.use_aux_hidden_state_outputs
    runner.execute_model_state = SimpleNamespace(input_batch=runner.batch, aux_hidden_states=[torch.zeros(6, 2)])
    out = runner.sample_tokens(None)
    assert runner.taps.taps == ([("A", 0, 0, 3, True), ("B", 7, 3, 1, False)], [0, 1, 2, 3], (4, 2))
    assert out.model_runner_output.omni_step_result == "result"
    runner.batch.num_computed_tokens_np[0] = 3
    assert not any(span.tapped for span in runner.spans(runner.batch)), "its answer's rows are not read"


def test_rows_go_in_and_sampled_tokens_come_out(runner):
    assert runner.rows.events == ["event"]
    assert runner.model_state.prepare_inputs_embeds({}, runner.batch, None)[:, 0].tolist() == [1, 1, 1, 8]
    runner.execute_model_state = None
    runner.sample_tokens(None)
    assert runner.rows.tokens == (["B"], [[6.0, 7.0]], [12]), "a's prompt is not complete"


def test_given_positions_go_on_behind_the_prompt(runner):
    """A preempted run computes three prompt tokens and two of its answer again."""
    assert list(runner.model_state.positions) == [0]
    positions, offset = runner.model_state.positions[0]
    assert positions[0].tolist() == [0, 2, 4, 7, 8] and offset == 4


def test_requests_are_forgotten(runner):
    assert runner.tapped == {"a": 3}
    runner._remove_request("a")
    runner._remove_request("unknown")
    assert runner.keys == {"b": "B"} and not runner.tapped


def arguments(function):
    return list(inspect.signature(function).parameters)


def test_what_is_held_on_to_exists():
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.mm.rope import RopeState
    from vllm.v1.worker.gpu.model_runner import ExecuteModelState, GPUModelRunner
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from triton_omni.backends.ar import upstream_v2

    for hooks, theirs in (
        (upstream_v2.V2HookedRunner, GPUModelRunner),
        (upstream_v2.HookedModelState, DefaultModelState),
    ):
        for name, ours in inspect.getmembers(hooks, inspect.isfunction):
            if name == "spans":
                assert not hasattr(theirs, name)
            elif name != "load_model":
                assert arguments(ours) == arguments(getattr(theirs, name))
    assert {"input_batch", "aux_hidden_states"} <= set(ExecuteModelState._fields)
    read = {"req_ids", "num_tokens", "input_ids", "query_start_loc_np", "num_computed_tokens_np", "logits_indices"}
    assert read <= {field.name for field in dataclasses.fields(InputBatch)}
    wanted = ["self", "req_idx", "model", "prefill_token_ids", "mm_features"]
    assert arguments(RopeState.init_prefill_positions) == wanted
