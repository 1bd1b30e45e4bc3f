# SPDX-License-Identifier: Apache-2.0
"""Thinker and talker with too little memory, on the checkpoint with the real numbers of codes and codebooks."""

from __future__ import annotations

import pytest

from backends.pipelines.qwen3_omni.pipeline import PIPELINE
from tests.kit.ar_worker import become_ar_worker
from tests.kit.chain import Chain
from tests.kit.omni_chats import CHATS, check, engines, references, request
from tests.kit.tiny_omni import Reference, tiny_omni

become_ar_worker()
pytestmark = pytest.mark.timeout(200)

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
