# SPDX-License-Identifier: Apache-2.0
"""What a thinker should never send to the talker: the run it is sent to fails, no other one's codes change."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from tests.kit import engine_driver as drive
from tests.kit.ar_worker import become_ar_worker
from tests.kit.omni_chats import blocks_of
from tests.kit.tiny_omni import tiny_omni
from triton_omni.backends.core.engine import EngineFailed, EngineFinished, Run
from triton_omni.backends.core.errors import StageFailed
from triton_omni.backends.core.generate import GenerateRequest, Sampling
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_omni.adapters import TalkerInput
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE

become_ar_worker()
pytestmark = pytest.mark.timeout(300)
WORDS = range(40, 52)
BLOCKS = 7  # of the cache: those of a run that failed are the next run's


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_omni(tmp_path_factory.mktemp("tiny_omni"))


@pytest.fixture(scope="module")
def config(folder):
    from transformers import AutoConfig  # torch: only once the process has its variables

    return AutoConfig.from_pretrained(folder)


@pytest.fixture(scope="module")
def talker(folder):
    options = {"model": str(folder), "dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "block_size": 32}
    options |= {"kv_cache_memory_bytes": 64 << 20, "vllm": {"num_gpu_blocks_override": BLOCKS}}
    engine = PIPELINE.stage("talker").engine(EngineContext("qwen3_omni", "talker", options))
    yield engine
    engine.close()


def piece(config, media=None, words=(WORDS[0],)) -> TalkerInput:
    """The first piece: a user's turn of two media positions and a word, the header, and the first words."""
    audio = config.thinker_config.audio_token_id
    ids = [config.im_start_token_id, config.user_token_id, audio, audio, 31]
    ids += [config.im_start_token_id, config.assistant_token_id, 32]
    rows = torch.full((2, config.talker_config.thinker_hidden_size), 0.1) if media is None else media
    return TalkerInput(ids, list(words), rows)


def new_run(seed=5) -> Run:
    sampling = {"temperature": 0.9, "max_tokens": 20}
    request = GenerateRequest(sampling=Sampling(seed=seed), stages={"talker": sampling})
    return Run(os.urandom(16), "r", request, upstream=frozenset({"thinker"}), feeds=True)


def open_with(talker, run, *pieces):
    talker.open(run)
    for place, given in enumerate(pieces):
        assert talker.feed(run, given, place + 1 == len(pieces))


def spoken(talker, config, *others):
    """Codes of a good run, with `others` beside it: (run, pieces)."""
    run = new_run()
    open_with(talker, run, piece(config), TalkerInput([], list(WORDS[1:])))
    for other, pieces in others:
        open_with(talker, other, *pieces)
    events = drive.step_until_idle(talker)
    assert isinstance(drive.end(events[run]), EngineFinished)
    return np.concatenate(drive.codes(events[run])).tolist(), events


def huge(config):
    """Numbers, but their products are none."""
    return torch.full((2, config.talker_config.thinker_hidden_size), 3e38)


def test_rows_that_grow_beyond_all_bounds_end_their_run_alone(talker, config):
    alone, _ = spoken(talker, config)
    free = blocks_of(talker)
    for _ in range(3):
        bad = new_run(seed=6)
        beside, events = spoken(talker, config, (bad, [piece(config, huge(config)), TalkerInput([], list(WORDS[1:]))]))
        failed = drive.end(events[bad])
        assert isinstance(failed, EngineFailed) and isinstance(failed.error, StageFailed)
        assert failed.error.where == "talker" and "not finite" in failed.error.message
        assert not drive.codes(events[bad])
        assert beside == alone
        assert spoken(talker, config)[0] == alone, "what the failed run left in the cache was read"
        assert blocks_of(talker) == free and not talker.has_work and not talker.llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda given, config: TalkerInput([*given.prompt_ids, 10**6], given.token_ids, given.media), "token ids"),
        (lambda given, config: TalkerInput(given.prompt_ids, [-1], given.media), "token ids"),
        (lambda given, config: TalkerInput(given.prompt_ids, [40], None), "missing"),
        (lambda given, config: TalkerInput(given.prompt_ids, [40], given.media[:1]), "missing"),
        (lambda given, config: TalkerInput(given.prompt_ids, [40], given.media[:, :5]), "missing"),
        (lambda given, config: TalkerInput(given.prompt_ids, [40], given.media * float("nan")), "not finite"),
        (lambda given, config: TalkerInput([31, 32], [40]), "assistant"),
    ],
)
def test_a_piece_that_is_none_is_refused_and_leaves_nothing(talker, config, change, says):
    run, free = new_run(), blocks_of(talker)
    talker.open(run)
    with pytest.raises(StageFailed, match=says) as caught:
        talker.feed(run, change(piece(config), config), False)
    assert caught.value.where == "thinker->talker"
    talker.stop(run)
    assert blocks_of(talker) == free and not talker.has_work and not talker.llm.engine.has_unfinished_requests()


def test_a_word_that_is_none_in_mid_answer(talker, config):
    """As the worker does it: feed raises, then the run is stopped; the other one goes on."""
    alone, _ = spoken(talker, config)
    bad, good = new_run(seed=6), new_run()
    open_with(talker, bad, piece(config), TalkerInput([], list(WORDS[1:4])), TalkerInput([], []))
    talker.stop(bad)
    for run in (bad, good):
        talker.open(run)
        assert talker.feed(run, piece(config), False)
    talker.step()
    with pytest.raises(StageFailed, match="token ids"):
        talker.feed(bad, TalkerInput([], [10**9]), False)
    talker.stop(bad)
    assert talker.feed(good, TalkerInput([], list(WORDS[1:])), True)
    rest = drive.step_until_idle(talker)
    assert np.concatenate(drive.codes(rest[good])).tolist() == alone[1:]
