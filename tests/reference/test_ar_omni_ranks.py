# SPDX-License-Identifier: Apache-2.0
"""Thinker and talker spread over two ranks each, in processes of their own: what transformers and one rank say."""

from __future__ import annotations

import gc
import os
import shutil
import signal

import numpy as np
import pytest

from tests.kit.ar_worker import become_ar_worker
from tests.kit.engine_chain import Chain
from tests.kit.gpu_devices import BUILD
from tests.kit.omni_chats import CHATS, check, come_and_go, engines, free_blocks, references, request
from tests.kit.omni_media import CASES, our_request, see
from tests.kit.tiny_omni import Reference, tiny_omni
from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.generate import Sampling
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE

RANKS = {"tensor_parallel_size": 2}
become_ar_worker(**RANKS)
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(BUILD != "cpu", reason="two ranks on one GPU are not what tensor parallel is"),
]
MEDIA = {"limit_mm_per_prompt": {"audio": 2, "image": 2, "video": 1}, "max_num_batched_tokens": 1024}
SAME = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path_factory.mktemp("queues")))
        yield tiny_omni(tmp_path_factory.mktemp("tiny_omni"))


@pytest.fixture(scope="module")
def model(folder):
    return Reference(folder)


@pytest.fixture(scope="module")
def reference(model):
    return references(model)


@pytest.fixture(scope="module")
def chain(folder):
    chain = Chain(PIPELINE, engines(folder, MEDIA | RANKS, RANKS))
    yield chain
    ranks = [rank for engine in chain.engines.values() for rank in ranks_of(engine)]
    assert len(ranks) == 4
    chain.close()
    assert [rank.exitcode for rank in ranks] == [-signal.SIGTERM] * 4, "they end at once when they are asked to"
    gc.collect()


@pytest.fixture(scope="module")
def single(folder):
    chain = Chain(PIPELINE, engines(folder, MEDIA))
    yield chain
    chain.close()
    gc.collect()


def ranks_of(engine):
    """The processes of an engine's ranks."""
    return [worker.proc for worker in engine.llm.engine.model_executor.workers]


def row_runs(worker):
    """Runs in a rank's RowStore: (key, all summed embeddings as bytes); called in the rank."""
    runs = worker.worker.model_runner.rows.runs
    return [(key, [total.numpy().tobytes() for total in run.sums]) for key, run in runs.items()]


def test_alone_and_together_equal_transformers(chain, reference):
    jobs = []
    for place, spoken in enumerate(reference):
        jobs.append(chain.open(request(place)))
        chain.run()
        check(jobs[-1], spoken)
    together = [chain.open(request(place)) for place in range(len(CHATS))]
    chain.run()
    for job, spoken in zip(together, reference, strict=True):
        check(job, spoken)


def test_media_equal_transformers_and_the_taps_one_rank(chain, single, model):
    jobs, alone = ({name: each.open(*our_request(case)) for name, case in CASES.items()} for each in (chain, single))
    chain.run()
    single.run()
    for name, case in CASES.items():
        check(jobs[name], see(model, case))
        taps, expected = jobs[name].sent("thinker", "media"), alone[name].sent("thinker", "media")
        assert taps.size and taps.dtype == np.float32
        np.testing.assert_allclose(taps, expected, rtol=0, atol=SAME)


def test_all_ranks_hold_the_same_rows_bit_for_bit(chain):
    """Each predicts for itself; one bit of difference would make every later row another."""
    job = chain.open(request(2, sampling=Sampling(temperature=0.0, max_tokens=30, seed=5)))
    while len(job.sent("talker", "codes")) < 8:
        chain.turn()
    first, second = chain.engines["talker"].llm.engine.collective_rpc(row_runs)
    assert first == second
    assert [len(sums) for _, sums in first] == [len(job.sent("talker", "codes"))]
    chain.run()


def test_drawn_codes_equal_those_of_one_rank(chain, single):
    drawn = {"talker": {"temperature": 0.9, "top_k": 50}}
    given = request(0, sampling=Sampling(temperature=0.0, max_tokens=12, seed=7), stages=drawn)
    jobs = [each.open(given) for each in (chain, single)]
    chain.run()
    single.run()
    several, one = (job.sent("talker", "codes").tolist() for job in jobs)
    assert several == one and several


@pytest.mark.parametrize("seed", range(2))
def test_joining_and_leaving_change_nothing_and_free_everything(chain, reference, seed):
    free = free_blocks(chain)
    jobs = come_and_go(chain, seed, {"thinker": 1, "talker": 1})
    for place, job in jobs.items():
        check(job, reference[place])
    assert free_blocks(chain) == free
    assert not chain.engines["talker"].gate.runs
    job = chain.open(request(0))
    while not job.sent("talker", "codes").size:
        chain.turn()
    for runs in chain.engines["talker"].llm.engine.collective_rpc(row_runs):
        assert len(runs) == 1, "a rank still holds runs that are over"
    chain.run()


def test_what_cannot_be_spread_is_refused_in_words(folder, tmp_path):
    """Heads that three ranks cannot share stop vLLM at once; broken weights are found by a rank, in its process."""
    with pytest.raises(Exception, match="divisible by tensor parallel size"):
        engines(folder, {"tensor_parallel_size": 3})
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = broken / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(OptionsError, match=r"stage 'thinker', rank [01]: SafetensorError: "):
        engines(broken, RANKS)
