# SPDX-License-Identifier: Apache-2.0
"""Both engines of the AR room under the contract of every engine."""

from __future__ import annotations

import pytest

from tests.kit.ar_runs import make_engine
from tests.kit.ar_worker import become_ar_worker
from tests.kit.engine_contract import CHECKS, Subject, check_name
from tests.kit.gpu_devices import VLLM_DEVICES
from tests.kit.tiny_checkpoints import tiny_llama
from tests.kit.tiny_omni import tiny_omni
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling, SpeechParams
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_omni.adapters import TalkerInput
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE

become_ar_worker()
pytestmark = pytest.mark.timeout(120)

WORDS = (40, 41, 42, 43, 44, 45)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("tiny_llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "triton_omni.backends.ar.engine.TEXT_EVERY_S", 0.0
        )  # else the clock says how many tokens a piece has
        yield lambda device: Subject(
            lambda: make_engine(folder, device, enable_prefix_caching=False),
            GenerateRequest(messages=(Message("user", "hello"),), sampling=Sampling(temperature=0.0, max_tokens=12)),
            refused=GenerateRequest(),
            wanted=frozenset({"text"}),
        )


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    folder = tiny_omni(tmp_path_factory.mktemp("tiny_omni"))
    options = {"model": str(folder), "dtype": "float32", "kv_cache_memory_bytes": 32 << 20, "max_model_len": 256}
    options |= {"sampling": {"temperature": 0.0, "max_tokens": 15}}
    ids = _special(folder)
    prompt = [ids["start"], ids["user"], 30, 31, ids["start"], ids["assistant"], 32]
    return lambda device: Subject(
        lambda: PIPELINE.stage("talker").engine(EngineContext("qwen3_omni", "talker", options, device)),
        GenerateRequest(),
        refused=GenerateRequest(speech=SpeechParams(voice="unknown")),
        upstream="thinker",
        inputs=(TalkerInput(prompt, [WORDS[0]]), *(TalkerInput([], [word]) for word in WORDS[1:]), TalkerInput([], [])),
        same=lambda event: (type(event).__name__, [t.data.tolist() for t in getattr(event, "tensors", ())]),
    )


def _special(folder):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    return {"start": config.im_start_token_id, "user": config.user_token_id, "assistant": config.assistant_token_id}


@pytest.mark.parametrize("kind", ["text", "frames"])
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
@pytest.mark.parametrize("device", VLLM_DEVICES)
def test_contract(check, kind, device, request):
    check(request.getfixturevalue(kind)(device))
