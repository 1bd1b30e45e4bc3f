# SPDX-License-Identifier: Apache-2.0
"""One run's data that our code cannot take ends that run alone; the others' tokens stay what they were."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from tests.kit.ar_runs import LENGTHS, PROMPTS, chat, drain, end, free_blocks, greedy_reference, step, text, tokens
from tests.kit.ar_worker import become_ar_worker
from tests.kit.tiny_checkpoints import tiny_llama
from triton_omni.backends.core.engine import EngineChunk, EngineFailed, EngineFinished
from triton_omni.backends.core.errors import StageFailed
from triton_omni.backends.core.outputs import TextPiece
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.chat.thinker import ChatPromptBuilder

become_ar_worker()
pytestmark = pytest.mark.timeout(150)


class AsciiFeed:
    """A pipeline's feed that fails for text that is not ASCII."""

    def __init__(self, state):
        self.run = state.run

    def chunks(self, output):
        output.outputs[0].text.encode("ascii")
        return (EngineChunk(self.run, piece=TextPiece(output.outputs[0].text)),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module")
def engine(folder):
    options = {"model": str(folder), "dtype": "float32", "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 8}
    # vLLM: only once the process has its variables
    from triton_omni.backends.ar.chat_prompts import read_chat_template
    from triton_omni.backends.ar.engine import ArEngine

    prompts = partial(ChatPromptBuilder, template=read_chat_template(str(folder)))
    engine = ArEngine(EngineContext("chat", "thinker", options), prompts, AsciiFeed)
    yield engine
    engine.close()


def test_an_answer_that_the_feed_cannot_take_ends_alone(engine, folder):
    reference = [expected for _, expected in greedy_reference(folder)]
    free = free_blocks(engine)
    runs = [chat(p, max_tokens=n, feeds=True) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    for run in runs:
        engine.open(run)
    events = drain(engine)
    failed = [run for run in runs if isinstance(end(events[run]), EngineFailed)]
    assert 0 < len(failed) < len(runs), "some answers must be ASCII and some not, or nothing is tested"
    for run, expected in zip(runs, reference, strict=True):
        if run not in failed:
            assert tokens(events[run]) == expected and text(events[run]).isascii()
            continue
        error = end(events[run]).error
        assert isinstance(error, StageFailed) and error.where == "thinker" and "UnicodeEncodeError" in error.message
        said = tokens(events[run])
        assert said == expected[: len(said)]
        assert sum(isinstance(event, EngineFailed) for event in events[run]) == 1
    assert not engine.has_work and not engine.llm.engine.has_unfinished_requests()
    assert free_blocks(engine) == free


def test_an_answer_that_fails_in_its_last_step(engine):
    """One token less, and it is complete: vLLM has let go of the run when our code fails over it."""
    other = chat("x", max_tokens=200, ignore_eos=True)
    engine.open(other)
    events = {}
    for prompt, length in itertools.product(PROMPTS, range(1, max(LENGTHS))):
        run = chat(prompt, max_tokens=length, feeds=True)
        engine.open(run)
        while run not in events or not isinstance(events[run][-1], EngineFinished | EngineFailed):
            step(engine, events)
        if isinstance(end(events[run]), EngineFailed):
            break
    else:
        raise AssertionError("no answer failed")
    drain(engine, events)
    assert len(tokens(events[other])) == 200 and not engine.llm.engine.has_unfinished_requests()
