# SPDX-License-Identifier: Apache-2.0
"""The thinker alone, from a checkpoint without a voice, against transformers; and what such a checkpoint cannot be."""

from __future__ import annotations

import gc
import json

import pytest

from tests.kit.ar_worker import become_ar_worker
from tests.kit.engine_chain import Chain
from tests.kit.omni_chats import CHATS, request
from tests.kit.omni_media import CASES, TOKENS, our_request, transformers_chat
from tests.kit.tiny_omni import tiny_omni
from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE as SPEAKING
from triton_omni.backends.pipelines.qwen3_omni_text.pipeline import PIPELINE

become_ar_worker()
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_omni(tmp_path_factory.mktemp("tiny_thinker"), speaks=False)


@pytest.fixture(scope="module")
def answers(folder):
    """Text tokens by transformers of every chat and every case with media."""
    import torch
    from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration

    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    assert not model.has_talker
    processor = AutoProcessor.from_pretrained(folder)

    def answer(chat, tokens, media):
        text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        inputs = dict(processor(text=text, return_tensors="pt", **media))
        if "use_audio_in_video" in media:
            inputs["use_audio_in_video"] = True
        ends = [model.config.im_end_token_id]
        out = model.generate(
            **inputs, thinker_max_new_tokens=tokens, thinker_do_sample=False, thinker_eos_token_id=ends
        )
        return out[0, inputs["input_ids"].shape[1] :].tolist()

    chats = [([{"role": role, "content": text} for role, text in said], tokens) for said, tokens in CHATS]
    found = {place: answer(chat, tokens, {}) for place, (chat, tokens) in enumerate(chats)}
    return found | {name: answer(chat, TOKENS, media) for name, (chat, media) in media_chats().items()}


def media_chats():
    return {name: transformers_chat(case) for name, case in CASES.items()}


def options(folder, **more):
    return {"model": str(folder), "dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8} | more


def test_text_is_transformers(folder, answers):
    limits = {"limit_mm_per_prompt": {"audio": 2, "image": 2, "video": 1}, "max_model_len": 1024}
    given = options(folder, max_num_batched_tokens=1024, **limits)
    context = EngineContext("qwen3_omni_text", "thinker", given)
    chain = Chain(PIPELINE, {"thinker": PIPELINE.stage("thinker").engine(context)})
    try:
        jobs = {place: chain.open(request(place)) for place in range(len(CHATS))}
        jobs |= {name: chain.open(*our_request(case)) for name, case in CASES.items()}
        chain.run()
    finally:
        chain.close()
        gc.collect()
    for key, job in jobs.items():
        assert job.tokens() == answers[key]


@pytest.mark.parametrize("stage", ["talker", "code2wav"])
def test_stages_of_a_voice_say_that_there_is_none(folder, stage):
    given = options(folder) if stage == "talker" else {"model": str(folder)}
    with pytest.raises(OptionsError, match=r"qwen3_omni_text|without speech"):
        SPEAKING.stage(stage).engine(EngineContext("qwen3_omni", stage, given))


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
@pytest.mark.parametrize(
    ("config", "complaint"),
    [('{"model_type": "llama"}', "'llama'"), ("{", "config.json"), ('{"model_type": "nothing"}', "config.json")],
)
def test_other_checkpoints_are_refused_by_name(tmp_path, stage, config, complaint):
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    given = {"model": str(tmp_path)}
    with pytest.raises(OptionsError, match=complaint):
        SPEAKING.stage(stage).engine(EngineContext("qwen3_omni", stage, given))


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
def test_a_missing_shard_is_named(folder, tmp_path, stage):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    index = {"weight_map": {"code2wav.x": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(OptionsError, match=r"model-00002-of-00002\.safetensors"):
        SPEAKING.stage(stage).engine(EngineContext("qwen3_omni", stage, {"model": str(tmp_path)}))


def test_too_little_memory_says_so(folder):
    given = options(folder, max_model_len=4096, kv_cache_memory_bytes=1 << 16)
    with pytest.raises(ValueError, match=r"KV cache|memory"):
        PIPELINE.stage("thinker").engine(EngineContext("qwen3_omni_text", "thinker", given))
