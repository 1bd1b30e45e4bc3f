# SPDX-License-Identifier: Apache-2.0
"""Runs for the AR engine, and what to read from their events."""

from __future__ import annotations

import os
import threading
from typing import Any

from tests.kit.gpu_devices import BUILD
from triton_omni.backends.core.engine import EngineFailed, EngineFinished, EngineOutput, Run
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling
from triton_omni.backends.core.outputs import TextPiece
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.chat.thinker import thinker_engine

PROMPTS = [
    "hello world",
    "the quick brown fox jumps over the lazy dog",
    "x",
    "Grüße aus Köln",
    "你好, привет",
    "1 2 3 4 5 6 7 8 9 0 " * 6,
    "speech and images " * 40,
    "You are a helpful assistant.",
]
LENGTHS = [24, 17, 40, 12, 32, 20, 28, 9]
STEP_LIMIT = 3000
GRAMMAR_S = 60.0


def make_engine(folder, device=BUILD, wake=lambda: None, **options):
    given = {"model": str(folder), "dtype": "float32", "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 8} | options
    return thinker_engine(EngineContext("chat", "thinker", given, device, wake=wake))


def chat(text, upstream=(), feeds=False, messages=None, priority=0, **sampling):
    """A run of one user message; greedy by default."""
    options: dict[str, Any] = {"temperature": 0.0} | sampling
    request = GenerateRequest(
        messages=messages or (Message("user", text),), sampling=Sampling(**options), priority=priority
    )
    return Run(os.urandom(16), "r", request, upstream=frozenset(upstream), wanted=frozenset({"text"}), feeds=feeds)


def drain(engine, into=None):
    """Step until nothing is left, grammars that are still compiled among it; {run: events}."""
    events = {} if into is None else into
    for _ in range(STEP_LIMIT):
        if not engine.has_work:
            if not engine.runs:
                return events
            await_grammars(engine)
        step(engine, events)
    raise AssertionError("the engine never became idle")


def await_grammars(engine):
    """Return when every live run's grammar is compiled."""
    from triton_omni.backends.ar.grammars import (  # vLLM: only in a process that has its variables
        is_compiling,
        when_compiled,
    )

    for state in engine.runs.values():
        if is_compiling(state.scheduled):
            compiled = threading.Event()
            when_compiled(state.scheduled, compiled.set)
            assert compiled.wait(GRAMMAR_S), "the grammar was never compiled"


def step(engine, events):
    for event in engine.step():
        events.setdefault(event.run, []).append(event)


def texts(events) -> list[TextPiece]:
    pieces = [event.piece for event in events if isinstance(event, EngineOutput)]
    return [piece for piece in pieces if isinstance(piece, TextPiece)]


def tokens(events):
    return [
        t for e in events if isinstance(e, EngineOutput) and isinstance(e.piece, TextPiece) for t in e.piece.token_ids
    ]


def text(events):
    return "".join(piece.text for piece in texts(events))


def end(events):
    assert isinstance(events[-1], EngineFinished | EngineFailed)
    return events[-1]


def answer(engine, run):
    engine.open(run)
    return drain(engine)[run]


def scheduler(engine):
    return engine.llm.engine.engine_core.engine_core.scheduler


def free_blocks(engine):
    return scheduler(engine).kv_cache_manager.block_pool.get_num_free_blocks()


def decode(engine, ids):
    """What the answer's tokens say, special ones left out, without a character that is not complete."""
    tokenizer = engine.llm.engine.renderer.get_tokenizer()
    return tokenizer.decode(ids, skip_special_tokens=True)


def greedy_reference(folder, lengths=LENGTHS):
    """(prompt ids, greedy answer ids) of every prompt, by transformers."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for text, length in zip(PROMPTS, lengths, strict=True):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(chat, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length)
        found.append((ids[0].tolist(), out[0, ids.shape[1] :].tolist()))
    return found
