# SPDX-License-Identifier: Apache-2.0
"""What a CPU can tell about the start on a GPU: vLLM's own memory check over the deploy files, and the comparison of
captured steps with eager ones."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit.ar_worker import become_ar_worker

become_ar_worker()

import torch  # noqa: E402
from vllm.config import CompilationConfig, CUDAGraphMode  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.mem_utils import MemorySnapshot  # noqa: E402
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402
from vllm.v1.worker.utils import request_memory  # noqa: E402

from triton_omni.backends.ar import upstream  # noqa: E402
from triton_omni.backends.ar.code_predictor import CodePredictor, ResidualSampling  # noqa: E402
from triton_omni.backends.ar.graph_check import fall_back_if_graphs_differ  # noqa: E402
from triton_omni.backends.ar.load import engine_arguments  # noqa: E402
from triton_omni.backends.ar.options import read_options  # noqa: E402
from triton_omni.backends.core.engine import OptionsError  # noqa: E402
from triton_omni.backends.core.pipeline import EngineContext  # noqa: E402
from triton_omni.backends.deploy.load import read_deploy  # noqa: E402

GPU_BYTES = 24 * 10**9  # of a deploy file that does not say
PIPELINES = Path(__file__).resolve().parents[2] / "backends" / "pipelines"


def ar_stages_of_a_gpu(path: Path) -> list[str]:
    return [
        name
        for name, stage in read_deploy(path, "cuda").stages.items()
        if stage.device == "cuda" and "kv_cache_memory_bytes" in stage.engine
    ]


DEPLOYS = [path for path in sorted(PIPELINES.glob("*/deploy*.yaml")) if ar_stages_of_a_gpu(path)]


@pytest.mark.parametrize("path", DEPLOYS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_stage_of_a_gpu_may_start_beside_the_others(path, tmp_path):
    """The others are up, whichever they are: so it is at the first start of the last one, and when one restarts."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    deploy = read_deploy(path, "cuda")
    stages = {name: stage for name, stage in deploy.stages.items() if stage.device == "cuda"}
    total = deploy.gpu_bytes or GPU_BYTES
    for name in ar_stages_of_a_gpu(path):
        stage = stages[name]
        options = read_options(stage.engine | {"model": "model"}, name)
        arguments = engine_arguments(options, EngineContext(deploy.pipeline, name, {}, "cuda", str(tmp_path)))
        assert arguments["enforce_eager"] is False
        assert arguments["async_scheduling"] is False, "not run on a GPU yet"
        for gpu in stage.gpus:
            others = [other for key, other in stages.items() if key != name and gpu in other.gpus]
            free = total - sum(other.gpu_memory_bytes for other in others)
            snapshot = MemorySnapshot(device="cpu", auto_measure=False, free_memory=free, total_memory=total)
            share = EngineArgs(**arguments).gpu_memory_utilization
            request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=share))


# --- batch invariance ------------------------------------------------------------------------------------------------
def arguments(folder, device, **given):
    (folder / "config.json").write_text("{}", encoding="utf-8")
    options = read_options({"model": str(folder)} | given, "thinker")
    return engine_arguments(options, EngineContext("chat", "thinker", {}, device))


def test_batch_invariant_is_float32_on_a_cpu(tmp_path):
    assert arguments(tmp_path, "cpu")["dtype"] == "auto"
    for dtype in ("auto", "float32"):
        assert arguments(tmp_path, "cpu", batch_invariant=True, dtype=dtype)["dtype"] == "float32"
    with pytest.raises(OptionsError, match="batch_invariant needs dtype float32"):
        arguments(tmp_path, "cpu", batch_invariant=True, dtype="bfloat16")
    assert arguments(tmp_path, "cuda", batch_invariant=True, dtype="bfloat16")["dtype"] == "bfloat16"


# --- captured steps --------------------------------------------------------------------------------------------------
class Runner:
    """What the comparison calls of vLLM's runner; `lie` is added to a captured step's rows."""

    def __init__(self, lie: float, dtype: torch.dtype = torch.bfloat16) -> None:
        self.lie, self.dtype = lie, dtype
        self.steps: list[tuple[int, CUDAGraphMode]] = []
        sizes = [1, 2, 4, 8]
        compilation = CompilationConfig(
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=8
        )
        config = SimpleNamespace(
            compilation_config=compilation,
            num_speculative_tokens=0,
            lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )
        self.cudagraph_dispatcher = CudagraphDispatcher(config)  # type: ignore[arg-type]
        self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY)
        self.output = torch.empty(8, 16, dtype=dtype)

    def _dummy_run(self, num_tokens, *, cudagraph_runtime_mode, force_attention, uniform_decode, randomize_inputs):
        assert force_attention and uniform_decode and randomize_inputs
        self.steps.append((num_tokens, cudagraph_runtime_mode))
        self.output[:num_tokens] = torch.randn(num_tokens, 16)
        if cudagraph_runtime_mode != CUDAGraphMode.NONE:
            self.output[: min(num_tokens, 1)] += self.lie
        return self.output[:num_tokens], self.output[:num_tokens]


def mode_of(runner, tokens):
    return runner.cudagraph_dispatcher.dispatch(tokens, uniform_decode=True)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_that_compute_the_same_stay(dtype, caplog):
    runner = Runner(lie=0.0, dtype=dtype)
    fall_back_if_graphs_differ(runner)
    assert mode_of(runner, 4) == CUDAGraphMode.FULL
    assert {tokens for tokens, _ in runner.steps} == {1, 8}, "the smallest and the largest"
    assert not caplog.records


@pytest.mark.parametrize("lie", [0.5, float("nan")])
def test_graphs_that_compute_something_else_are_not_used(lie, caplog):
    runner = Runner(lie=lie)
    assert mode_of(runner, 4) == CUDAGraphMode.FULL
    with caplog.at_level(logging.WARNING):
        fall_back_if_graphs_differ(runner)
    assert mode_of(runner, 4) == CUDAGraphMode.NONE
    assert "without CUDA graphs" in caplog.text


def test_the_comparison_leaves_the_random_state_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    fall_back_if_graphs_differ(Runner(lie=0.0))
    assert torch.equal(torch.rand(4), expected)


def test_the_real_runner_takes_what_the_comparison_gives():
    parameters = inspect.signature(GPUModelRunner._dummy_run).parameters
    assert {"num_tokens", "cudagraph_runtime_mode", "force_attention", "uniform_decode", "randomize_inputs"} <= set(
        parameters
    )


@pytest.mark.parametrize("alone", [True, False])
def test_frames_of_the_only_rank_are_captured(alone, monkeypatch):
    """Ranks that fell back one by one would compute other rows than the rest."""
    config = SimpleNamespace(
        num_code_groups=3, num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        intermediate_size=8, vocab_size=4,
    )  # fmt: skip
    network = torch.nn.Module()
    network.code_predictor = CodePredictor(config, 8, 1, ResidualSampling(2, 1.0))  # type: ignore[arg-type]
    captured = []
    monkeypatch.setattr(CodePredictor, "capture", lambda predictor: captured.append(predictor))
    monkeypatch.setattr(upstream, "is_only_rank", lambda: alone)
    upstream.capture_frames(network)
    assert captured == ([network.code_predictor] if alone else [])
    upstream.capture_frames(torch.nn.Linear(1, 1))
    assert len(captured) == alone
