# SPDX-License-Identifier: Apache-2.0
"""Options that users set first, on tiny checkpoints: a quantized thinker, prefix caching on and off."""

from __future__ import annotations

import json

import pytest

from tests.kit.ar_worker import become_ar_worker

become_ar_worker()

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from tests.kit.ar_runs import PROMPTS, answer, chat, end, make_engine, tokens  # noqa: E402
from tests.kit.tiny_checkpoints import tiny_llama  # noqa: E402

pytestmark = pytest.mark.timeout(240)
INT8_MAX = 127


def int8_llama(folder):
    """tiny_llama as compressed-tensors stores int8: weights by row, activations by token at run time."""
    tiny_llama(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "proj" in name]:
        rows = weights[name]
        scales = rows.abs().amax(1, keepdim=True) / INT8_MAX
        weights[name] = (rows / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
        weights[f"{name.removesuffix('.weight')}.weight_scale"] = scales
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def first_tokens(engine):
    return [tokens(answer(engine, chat(prompt, max_tokens=1))) for prompt in PROMPTS]


def test_an_int8_thinker_answers_as_its_float_one(tmp_path):
    """Random weights: a scale that was lost or taken from another row would leave no first token as it was."""
    plain = make_engine(tiny_llama(tmp_path / "float"))
    expected = first_tokens(plain)
    plain.close()
    engine = make_engine(int8_llama(tmp_path / "int8"), dtype="bfloat16")  # the int8 kernels of a CPU take no other
    got = first_tokens(engine)
    assert sum(a == b for a, b in zip(got, expected, strict=True)) >= len(PROMPTS) - 2
    events = answer(engine, chat(PROMPTS[0], max_tokens=8))
    assert end(events).reason == "length" and len(tokens(events)) == 8
    engine.close()


def test_prefix_caching_changes_the_count_and_no_token(tmp_path):
    folder = tiny_llama(tmp_path / "model")
    answers = []
    for cached in (True, False):
        engine = make_engine(folder, enable_prefix_caching=cached, block_size=32)
        first, second = (answer(engine, chat(PROMPTS[6], max_tokens=12)) for _ in range(2))
        assert end(first).usage["cached_tokens"] == 0
        assert (end(second).usage["cached_tokens"] > 0) is cached
        answers += [tokens(first), tokens(second)]
        engine.close()
    assert len(answers[0]) == 12 and all(ids == answers[0] for ids in answers)
