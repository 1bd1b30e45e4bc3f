# SPDX-License-Identifier: Apache-2.0
"""Thinker and talker with too little memory, on the checkpoint with the real numbers of codes and codebooks."""

from __future__ import annotations

import pytest

from tests.kit.ar_worker import become_ar_worker
from tests.kit.engine_chain import Chain
from tests.kit.omni_chats import CHATS, FRAMES, check, engines, references, request
from tests.kit.omni_media import CASES, our_request, transformers_chat
from tests.kit.tiny_omni import Reference, tiny_omni
from triton_omni.backends.core.generate import Sampling
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE

become_ar_worker()
pytestmark = pytest.mark.timeout(300)

TIGHT = {
    "max_num_batched_tokens": 32,
    "max_model_len": 192,
    "block_size": 32,
    "enable_prefix_caching": False,
    "vllm": {"num_gpu_blocks_override": 8},
}


def test_chunked_prefill_and_preemption_change_nothing(tmp_path):
    """At most 32 tokens a step, and a KV cache that cannot hold all runs: some are computed twice."""
    folder = tiny_omni(tmp_path, real_ids=True)
    expected = references(Reference(folder))
    chain = Chain(PIPELINE, engines(folder, TIGHT, TIGHT))
    try:
        assert max(len(spoken.prompt_ids) for spoken in expected) > 32, "no prompt needs a second chunk"
        jobs = [chain.open(request(place)) for place in range(len(CHATS))]
        chain.run()
        for job, spoken in zip(jobs, expected, strict=True):
            check(job, spoken)
        preempted = {name: sum(job.end(name).usage["preemptions"] for job in jobs) for name in chain.engines}
        assert preempted["talker"], "the cache was large enough for all; nothing was tested"
    finally:
        chain.close()


def test_preempted_images_audio_and_videos_change_nothing(tmp_path):
    """The cache holds all prompts, but not all answers: prompts with media are computed twice, in pieces."""
    folder, tokens = tiny_omni(tmp_path), 60
    model = Reference(folder)
    cases = {name: CASES[name] for name in ("image", "audio", "two images", "image and audio")}
    expected = {}
    for name, case in cases.items():
        messages, media = transformers_chat(case)
        expected[name] = model.see(messages, tokens, FRAMES, **media)
    begin, end = (sum((len(e.prompt_ids) + n) // 32 + 1 for e in expected.values()) for n in (0, tokens))
    limits = {"limit_mm_per_prompt": {"audio": 2, "image": 2, "video": 1}, "max_model_len": 256}
    limits |= {"max_num_batched_tokens": 48, "vllm": {"num_gpu_blocks_override": (begin + end) // 2}}
    chain = Chain(PIPELINE, engines(folder, TIGHT | limits))
    try:
        sampling = Sampling(temperature=0.0, max_tokens=tokens)
        jobs = {name: chain.open(*our_request(case, sampling=sampling)) for name, case in cases.items()}
        chain.run()
        for name, job in jobs.items():
            check(job, expected[name])
        preempted = {name for name, job in jobs.items() if job.end("thinker").usage["preemptions"]}
        assert preempted, "the cache was large enough for all; nothing was tested"
    finally:
        chain.close()
