# SPDX-License-Identifier: Apache-2.0
"""Chats for the tiny omni checkpoint, engines for its stages, and the comparison with transformers."""

from __future__ import annotations

import random
from typing import Any

from tests.kit.gpu_devices import BUILD
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE

SYSTEM = "You are Qwen, a helpful assistant."
FRAMES = 30
CHATS = [
    ([("user", "hello world")], 24),
    ([("system", SYSTEM), ("user", "the quick brown fox jumps over the lazy dog")], 17),
    ([("user", "speech and images")], 30),
    ([("system", SYSTEM), ("user", "hello"), ("assistant", "hello you"), ("user", "and images?")], 12),
    ([("user", "x")], 2),
    ([("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"), ("user", "five")], 20),
    ([("system", "Be brief."), ("user", "this is a test of speech " * 5)], 9),
    ([("user", "Grüße, 你好!")], 16),
]


def code2wav(folder, device="cpu", **more):
    given = {"model": str(folder)} | more
    return PIPELINE.stage("code2wav").engine(EngineContext("qwen3_omni", "code2wav", given, device=device))


def engines(folder, thinker=None, talker=None, device=BUILD):
    common = {"model": str(folder), "dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8}
    no_media = {"limit_mm_per_prompt": {"audio": 0, "image": 0, "video": 0}, "max_model_len": 1024}
    greedy = {"sampling": {"temperature": 0.0, "max_tokens": FRAMES}, "max_model_len": 512}
    options = {"thinker": common | no_media | (thinker or {}), "talker": common | greedy | (talker or {})}
    contexts = {name: EngineContext("qwen3_omni", name, given, device) for name, given in options.items()}
    return {name: PIPELINE.stage(name).engine(context) for name, context in contexts.items()}


def references(model):
    """What transformers makes of every chat."""
    return [
        model.speak([{"role": role, "content": text} for role, text in chat], tokens, FRAMES) for chat, tokens in CHATS
    ]


def request(place, **more):
    chat, tokens = CHATS[place]
    messages = tuple(Message(role, text) for role, text in chat)
    given: dict[str, Any] = {"sampling": Sampling(temperature=0.0, max_tokens=tokens)} | more
    return GenerateRequest(messages=messages, **given)


def check(job, spoken):
    assert job.tokens() == spoken.token_ids
    assert job.sent("talker", "codes").T.tolist() == spoken.codes


def come_and_go(chain, seed, pace):
    """All chats in some order, joined by strangers that leave before they are done, while stages turn as often as
    `pace` says (by name); the jobs of the chats, by place."""
    rng = random.Random(seed)
    waiting = rng.sample(range(len(CHATS)), len(CHATS))
    jobs, strangers = {}, []
    while waiting:
        if rng.random() < 0.3:
            place = waiting.pop()
            jobs[place] = chain.open(request(place))
        if rng.random() < 0.3:
            strangers.append(chain.open(request(rng.randrange(len(CHATS)))))
        if strangers and rng.random() < 0.4:
            chain.stop(strangers.pop(rng.randrange(len(strangers))))
        chain.turn(*rng.choices(list(pace), list(pace.values()), k=2))
    for job in strangers:
        chain.stop(job)
    chain.run()
    return jobs


def blocks_of(engine):
    return engine.llm.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def free_blocks(chain):
    return [blocks_of(engine) for engine in chain.engines.values()]
