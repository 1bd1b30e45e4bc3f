# SPDX-License-Identifier: Apache-2.0
"""The AR engine with too little memory. A module of its own: vLLM allows one live engine per process."""

from __future__ import annotations

import pytest

from tests.kit.ar_runs import PROMPTS, answer, chat, drain, end, greedy_reference, make_engine, tokens
from tests.kit.ar_worker import become_ar_worker
from tests.kit.tiny_checkpoints import tiny_llama

become_ar_worker()
pytestmark = pytest.mark.timeout(120)
LONG_PROMPT = 1924  # words of one token each
ANSWER = 80  # tokens: long enough that all runs are live at once and outgrow the cache


def test_chunked_prefill_and_preemption_change_nothing(tmp_path):
    """A step takes at most 32 tokens, and the KV cache is too small for all runs at once."""
    folder = tiny_llama(tmp_path)
    reference = greedy_reference(folder, [ANSWER] * len(PROMPTS))
    small = make_engine(
        folder, max_num_batched_tokens=32, max_model_len=512, enable_prefix_caching=False, block_size=32,
        vllm={"num_gpu_blocks_override": 18},
    )  # fmt: skip
    try:
        longest = max(len(ids) for ids, _ in reference)
        assert longest > 32, "no prompt needs a second chunk"
        runs = [chat(p, max_tokens=ANSWER) for p in PROMPTS]
        for run in runs:
            small.open(run)
        events = drain(small)
        assert [tokens(events[run]) for run in runs] == [expected for _, expected in reference]
        assert sum(end(events[run]).usage["preemptions"] for run in runs), (
            "the cache was large enough for all; nothing was tested"
        )
    finally:
        small.close()


def test_seeded_prompts_computed_in_pieces_change_nothing(tmp_path):
    """Six prompts of about 1,934 tokens at the default token budget: most of them are computed over several steps."""
    folder = tiny_llama(tmp_path)
    engine = make_engine(
        folder, max_num_batched_tokens=2048, max_model_len=2048, enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20, hf_overrides={"max_position_embeddings": 2048},
    )  # fmt: skip
    try:

        def runs():
            return [chat(f"{i} " + "a " * LONG_PROMPT, max_tokens=12, temperature=0.9, seed=i) for i in range(6)]

        alone = [answer(engine, run) for run in runs()]
        together = runs()
        for run in together:
            engine.open(run)
        events = drain(engine)
        assert [tokens(events[run]) for run in together] == [tokens(events) for events in alone]
        assert end(events[together[0]]).usage["prompt_tokens"] > 1900
    finally:
        engine.close()
