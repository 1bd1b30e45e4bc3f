# SPDX-License-Identifier: Apache-2.0
"""With `batch_invariant` the embedded chat model says the same to many prompts, alone and sharing every step."""

from __future__ import annotations

import gc

import pytest

from tests.kit.ar_runs import answer, chat, drain, make_engine, tokens
from tests.kit.ar_worker import become_ar_worker
from triton_omni.backends.config.paths import models_dir

become_ar_worker()
pytestmark = [pytest.mark.models, pytest.mark.timeout(240)]

SUBJECTS = ("rivers", "bread", "old trains", "the moon", "jazz", "winter", "prime numbers", "a lost key")
QUESTIONS = ("Tell me about {}.", "Write one sentence on {}.", "Why do people like {}?")
PROMPTS = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
LENGTH = 12


@pytest.fixture(scope="module")
def engine():
    folder = models_dir() / "smollm2-135m-instruct"
    if not folder.is_dir():
        pytest.skip(f"no model in {folder} (make setup)")
    limits = {"max_num_seqs": 16, "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}
    engine = make_engine(folder, dtype="auto", batch_invariant=True, **limits)
    yield engine
    engine.close()
    gc.collect()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_many_prompts_alone_and_together(engine, temperature):
    def run(index):
        return chat(PROMPTS[index], max_tokens=LENGTH, temperature=temperature, seed=index)

    alone = [tokens(answer(engine, run(index))) for index in range(len(PROMPTS))]
    assert len({tuple(answer) for answer in alone}) > len(PROMPTS) // 2
    runs = [run(index) for index in range(len(PROMPTS))]
    for each in runs:
        engine.open(each)
    events = drain(engine)
    assert [tokens(events[each]) for each in runs] == alone
