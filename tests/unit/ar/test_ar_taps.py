# SPDX-License-Identifier: Apache-2.0
"""Hidden rows are copied on their device and in their dtype, and reach the host only on the way to another process."""

from __future__ import annotations

import pickle
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from triton_omni.backends.ar import taps  # noqa: E402
from triton_omni.backends.ar.hooks import RUN_KEY, Span  # noqa: E402
from triton_omni.backends.ar.upstream import HookedRunner  # noqa: E402
from triton_omni.backends.pipelines.qwen3_omni.network import PromptParts  # noqa: E402
from triton_omni.backends.pipelines.qwen3_omni.thinker import in_order  # noqa: E402

MEDIA = 7


@pytest.fixture
def host_copies(monkeypatch):
    """Shapes of the tensors that were copied to the host."""
    copied, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copied.append(tuple(self.shape)) or cpu(self))
    return copied


def tap(*tapped):
    """Spans of four tokens, the middle two of them media, in one step; returns (step result, the layer)."""
    reader = taps.TokenTaps([MEDIA])
    spans = [Span(f"run {k}", 10, 4 * k, 4, is_tapped) for k, is_tapped in enumerate(tapped)]
    layer = torch.arange(len(spans) * 4 * 3, dtype=torch.bfloat16).reshape(-1, 3)
    reader.on_forward(spans, torch.tensor([1, MEDIA, MEDIA, 2] * len(spans)), [layer])
    return reader.step_result(), layer


def test_rows_stay_in_the_networks_dtype_and_off_the_host(host_copies):
    [(key, positions, rows)], layer = tap(False, True)
    assert (key, positions, rows.dtype) == ("run 1", [11, 12], torch.bfloat16)
    assert torch.equal(rows, layer[5:7])
    layer[:] = 0  # vLLM's buffer of the next step
    assert rows.any()
    assert host_copies == [(8,)], "the mask of media tokens alone"


def test_a_step_without_tapped_runs_reads_nothing_back(host_copies):
    assert tap(False, False)[0] is None
    assert host_copies == []


@pytest.mark.parametrize(("computed", "tapped"), [(0, True), (19, True), (20, False), (25, False)])
def test_a_tapped_run_is_read_until_its_prompt_is_computed(computed, tapped):
    """A step of its answer needs no rows, so nothing that waits for the device may be read for it."""
    params = types.SimpleNamespace(skip_reading_prefix_cache=True, extra_args={RUN_KEY: "run 1"})
    request = types.SimpleNamespace(sampling_params=params, num_prompt_tokens=20)
    batch = types.SimpleNamespace(req_ids=["a"], num_computed_tokens_cpu=[computed])
    runner = types.SimpleNamespace(input_batch=batch, requests={"a": request})
    [span] = HookedRunner.spans(runner, types.SimpleNamespace(num_scheduled_tokens={"a": 1}))
    assert span == Span("run 1", computed, 0, 1, tapped)


def test_rows_of_a_rank_in_another_process_go_through_the_host(monkeypatch, host_copies):
    monkeypatch.setattr(taps, "is_only_rank", lambda: False)
    tap(True)
    assert host_copies == [(4,), (2, 3)]


def test_rows_are_ordered_by_position_and_the_last_of_a_position_counts():
    first, again = torch.tensor([[1.0], [2.0]]), torch.tensor([[9.0], [3.0]])
    assert in_order([4, 5, 5, 2], [first, again]).tolist() == [[3.0], [1.0], [9.0]]


def test_a_prompt_is_pickled_for_other_ranks_from_the_host(host_copies):
    parts = PromptParts([1], [2], [0], torch.ones(1, 3))
    read = pickle.loads(pickle.dumps(parts))
    assert (read.token_ids, read.media.tolist()) == ([1], [[1.0, 1.0, 1.0]])
    assert host_copies == [(1, 3)]
    assert pickle.loads(pickle.dumps(PromptParts([1], [2], [], None))).media is None
