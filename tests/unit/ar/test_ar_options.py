# SPDX-License-Identifier: Apache-2.0
"""Options, checkpoint look-up and environment of the AR engine; none of it needs vLLM."""

from __future__ import annotations

import json

import pytest

from triton_omni.backends.ar.environment import GPU_THREADS, worker_environment
from triton_omni.backends.ar.options import checkpoint, read_options
from triton_omni.backends.core.engine import OptionsError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "m", "max_num_seq": 4}, "did you mean 'max_num_seqs'"),
        ({"model": "m", "sampling": {"temprature": 1.0}}, "did you mean 'temperature'"),
        ({}, "model"),
        ({"model": ""}, "model must name"),
        ({"model": "m", "max_num_seqs": 0}, "max_num_seqs"),
        ({"model": "m", "gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"model": "m", "scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"model": "m", "runner": "v3"}, "runner"),
    ],
)
def test_wrong_options_are_named(given, words):
    with pytest.raises(OptionsError, match=words) as caught:
        read_options(given, "thinker")
    assert "stage 'thinker'" in str(caught.value)


def test_defaults_trust_no_remote_code():
    options = read_options({"model": "m"}, "thinker")
    assert not options.trust_remote_code
    assert options.enable_prefix_caching


def _folder(path, *files):
    path.mkdir()
    for name in files:
        (path / name).write_text("{}", encoding="utf-8")
    return path


def test_relative_model_names_are_looked_up_in_the_models_folder(tmp_path):
    folder = _folder(tmp_path / "small", "config.json")
    assert checkpoint(read_options({"model": "small"}, "s"), str(tmp_path)) == str(folder)
    assert checkpoint(read_options({"model": str(folder)}, "s"), "/elsewhere") == str(folder)


def test_an_unknown_model_is_a_hub_name_only_while_there_is_a_hub(tmp_path, monkeypatch):
    options = read_options({"model": "org/name"}, "s")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert checkpoint(options, str(tmp_path)) == "org/name"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OptionsError, match="there is no folder"):
        checkpoint(options, str(tmp_path))


def test_an_incomplete_checkpoint_names_the_missing_file(tmp_path):
    _folder(tmp_path / "empty")
    with pytest.raises(OptionsError, match=r"config\.json is missing"):
        checkpoint(read_options({"model": "empty"}, "s"), str(tmp_path))
    folder = _folder(tmp_path / "big", "config.json", "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(OptionsError, match=r"model-2\.safetensors"):
        checkpoint(read_options({"model": "big"}, "s"), str(tmp_path))


def test_a_cpu_worker_preloads_the_openmp_of_its_own_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert "LD_PRELOAD" not in worker_environment({}, "cpu", tmp_path)
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    found = worker_environment({"threads": 3}, "cpu", tmp_path)
    assert found["LD_PRELOAD"] == str(library)
    assert found["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    assert worker_environment({}, "cpu", tmp_path)["LD_PRELOAD"] == f"{library}:/lib/other.so"
    monkeypatch.setenv("LD_PRELOAD", "/lib/libgomp.so")  # two OpenMP runtimes in one process do not mix
    assert "LD_PRELOAD" not in worker_environment({}, "cpu", tmp_path)


def test_a_gpu_worker_keeps_its_compiler_and_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    found = worker_environment({}, "cuda", tmp_path)
    assert not {"TORCH_COMPILE_DISABLE", "LD_PRELOAD", "VLLM_BATCH_INVARIANT"} & set(found)
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert found["OMP_NUM_THREADS"] == str(GPU_THREADS), "stubs start workers with one thread by default"
    assert worker_environment({"threads": 3}, "cuda", tmp_path)["OMP_NUM_THREADS"] == "3"


def test_a_gpu_worker_samples_alike_on_all_hosts(tmp_path, monkeypatch):
    """vLLM takes FlashInfer's sampler where nvcc and ninja are on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/local/cuda/bin")
    found = worker_environment({"batch_invariant": True}, "cuda", tmp_path)
    assert found["VLLM_USE_FLASHINFER_SAMPLER"] == "0" and found["VLLM_BATCH_INVARIANT"] == "1"
    assert str(tmp_path) not in found["PATH"] and "cuda" not in found["PATH"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stages_of_a_server_choose_their_runners(device, tmp_path, monkeypatch):
    """Each stage is a process; what deploy says beats what the server was started with."""

    def v2(**options):
        return worker_environment(options, device, tmp_path)["VLLM_USE_V2_MODEL_RUNNER"]

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert (v2(), v2(runner="v1"), v2(runner="v2")) == ("0", "0", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert (v2(), v2(runner="v1"), v2(runner="v2")) == ("1", "0", "1")
