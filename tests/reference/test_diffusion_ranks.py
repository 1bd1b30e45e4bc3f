# SPDX-License-Identifier: Apache-2.0
"""One instance on several ranks, as real processes with Gloo: equal images, one end per request."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.process_pidfds import is_gone
from tests.kit.tiny_edit import SOURCE_PIXELS, edit_run, photo, save_tiny_edit
from tests.kit.tiny_image import ends, engine_of, finish, generate_latents, image_run, images_of, save_tiny_image
from tests.reference.test_diffusion_invariance import make_run, random_requests, randomized_lifecycle
from triton_omni.backends.core.engine import EngineFailed, OptionsError
from triton_omni.backends.core.errors import BadRequest, StageFailed

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(600)  # each test starts processes that import torch, maybe on a busy machine

GUIDED = {"width": 64, "height": 96, "negative_prompt": " ", "true_cfg_scale": 2.5}
GONE_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_image(tmp_path_factory.mktemp("image") / "tiny")


@pytest.fixture(scope="module")
def edit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_edit(tmp_path_factory.mktemp("edit") / "tiny", several=True, sources_at_zero=True)


@contextmanager
def ranks(folder: Path, parallel: dict[str, Any], **options: Any) -> Iterator[Any]:
    """An engine on several ranks; their processes must exit afterwards."""
    engine = engine_of(folder, parallel=parallel, **options)
    ranks = [os.pidfd_open(pid) for pid in engine.model.ranks.pids]
    try:
        yield engine
    finally:
        engine.close()
        for rank in ranks:
            assert is_gone(rank, GONE_S)
            os.close(rank)


def generate(engine: Any, runs: list[Any]) -> list[np.ndarray]:
    for run in runs:
        engine.open(run)
    events = finish(engine)
    return [image for run in runs for image in images_of(events, run)]


# --- the same images ---------------------------------------------------------------------------------------
@pytest.mark.bytes_exact
def test_two_ranks_give_the_bytes_of_one_in_any_batch(folder: Path) -> None:
    same_bytes(folder, random_requests(24), (400, 100_000))


@pytest.mark.bytes_exact
def test_edits_on_two_ranks_have_the_bytes_of_one(edit_folder: Path) -> None:
    asked = random_requests(12)
    for number, one in enumerate(asked):
        if number % 3:
            given = photo(one.pop("width"), one.pop("height"), number)
            one["images"] = [given, photo(40, 90, 2)][: number % 3]
    same_bytes(edit_folder, asked, (100_000,), defaults={"source_pixels": SOURCE_PIXELS})


def same_bytes(folder: Path, asked: list[dict[str, Any]], budgets: tuple[int, ...], **deploy: Any) -> None:
    """Each request alone on one rank, then all of them on two: joins, aborts and failures included."""
    alone = engine_of(folder, **deploy)
    expected = [[p.tobytes() for p in generate(alone, [make_run(one)])] for one in asked]
    with ranks(folder, {"cfg": 2}, **deploy) as engine:
        for trial, budget in enumerate(budgets):
            engine.max_tokens = budget
            runs, undisturbed, events = randomized_lifecycle(engine, asked, random.Random(trial))
            assert len(runs) == len(asked) and 2 * len(undisturbed) > len(asked)
            for number in undisturbed:
                assert [p.tobytes() for p in images_of(events, runs[number])] == expected[number], asked[number]
            for number in set(runs) - undisturbed:
                assert all(isinstance(end, EngineFailed) for end in ends(events, runs[number]))


def test_request_that_fails_on_a_rank_fails_alone(folder: Path) -> None:
    with ranks(folder, {"cfg": 2}) as engine:
        bad, good = (image_run("two", **GUIDED, steps=6, seed=seed) for seed in (1, 2))
        engine.open(bad)
        engine.open(good)
        while bad.state.step < 2:
            engine.step()
        held = [[(part.source.run, part.branch) for part in share] for share in engine.model.forward._shares]
        assert sorted(map(len, held)) == [2, 2]
        assert {run for run, _ in held[1]} == {bad, good}
        bad.state.latents = bad.state.latents[:, :, :-1]
        events = finish(engine)
        (end,) = ends(events, bad)
        assert isinstance(end, EngineFailed) and end.error.message.startswith("step 3 failed")
        again = image_run("two", **GUIDED, steps=6, seed=2)
        assert np.array_equal(images_of(events, good)[0], generate(engine, [again])[0])


@pytest.mark.parametrize(("batching", "most_levels"), [("seq", 0), ("pad", 1)])
def test_stock_arithmetic_on_two_ranks(folder: Path, batching: str, most_levels: int) -> None:
    def runs() -> list[Any]:
        return [
            image_run("a red 7", **GUIDED, steps=5, seed=1, n=2),
            image_run("3", width=64, height=64, steps=4, seed=2),
        ]

    one = generate(engine_of(folder, batching=batching), runs())
    with ranks(folder, {"cfg": 2}, batching=batching) as engine:
        for ours, theirs in zip(generate(engine, runs()), one, strict=True):
            assert int(np.abs(ours.astype(int) - theirs.astype(int)).max()) <= most_levels


# --- context parallel ----------------------------------------------------------------------------------------
def test_two_ranks_split_the_tokens_of_an_image(edit_folder: Path) -> None:
    """Texts of odd lengths, sources at time zero, n > 1; within rounding of one rank."""

    def runs() -> list[Any]:
        return [
            edit_run("a red 7", [photo(64, 64, 3)], **GUIDED, steps=4, seed=1),
            image_run("two", **GUIDED, steps=5, seed=2, n=2),
            image_run("a blue 5", width=64, height=64, steps=3, seed=3),
        ]

    options = {"batching": "seq", "defaults": {"source_pixels": SOURCE_PIXELS}}
    found: list[list[Any]] = []
    with ranks(edit_folder, {"context": 2}, **options) as engine:
        for one in (engine_of(edit_folder, **options), engine):
            found.append(generate_latents(one, runs())[0])
        for alone, shared in zip(*found, strict=True):
            assert float((alone - shared).abs().max()) <= 1e-5
        bad = image_run("two", width=64, height=64, steps=4, seed=1)
        engine.open(bad)
        while bad.state.step < 1:
            engine.step()
        bad.state.latents = bad.state.latents[:, :, :-1]
        assert [type(end) for end in ends(finish(engine), bad)] == [EngineFailed]  # on both ranks, which stay in step
        assert len(generate(engine, [image_run("two", width=64, height=64, steps=2)])) == 1
        with pytest.raises(BadRequest, match="9 image tokens are not divisible by 2 ranks") as caught:
            engine.open(image_run("two", width=48, height=48, steps=4))
        assert caught.value.where == "stages.denoiser.width"


def test_ring_attention_is_refused_on_a_cpu(folder: Path) -> None:
    with pytest.raises(OptionsError, match=r"parallel: kind: ring: .*GPUs only"):
        engine_of(folder, parallel={"context": 2, "kind": "ring"}, batching="seq", dtype="bfloat16")
    q = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError):  # what diffusers calls for it; its default says nothing of what it saw
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)


def test_indivisible_heads_are_refused(folder: Path) -> None:
    with pytest.raises(OptionsError, match=r"parallel: kind: ulysses: 2 attention heads are not divisible by 3"):
        engine_of(folder, parallel={"context": 3}, batching="seq")


# --- ends ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("parallel", [{"cfg": 2}, {"context": 2}])
def test_rank_that_dies_ends_the_step_with_one_error(folder: Path, parallel: dict[str, Any]) -> None:
    with ranks(folder, parallel, batching="seq") as engine:
        fails(engine, signal.SIGKILL, "rank 1 of 2 died by SIGKILL")


def test_rank_that_hangs_ends_the_step_after_the_timeout(folder: Path) -> None:
    with ranks(folder, {"cfg": 2, "answer_s": 5}) as engine:
        fails(engine, signal.SIGSTOP, "rank 1 of 2 did not reply within 5 s")


def fails(engine: Any, number: signal.Signals, says: str) -> None:
    """The step raises StageFailed with the reason; the worker's loop fails every run with it."""
    run = image_run("two", **GUIDED, steps=50, seed=1)
    engine.open(run)
    while run.state.step < 2:
        engine.step()
    os.kill(engine.model.ranks.pids[0], number)
    with pytest.raises(StageFailed, match=says):
        finish(engine)


ENGINE_PROCESS = """
import sys
from pathlib import Path
from tests.kit.tiny_image import engine_of
engine = engine_of(Path(sys.argv[1]), parallel={"cfg": 2})
print(*engine.model.ranks.pids, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def engine_process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An idle engine in its own process; its first line of output lists the process ids of its ranks."""
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE_PROCESS, str(folder)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield process
        process.kill()


def rank_of(engine_process: subprocess.Popen[bytes]) -> int:
    assert engine_process.stdout is not None
    return int(engine_process.stdout.readline())


def test_rank_ends_with_its_engine(engine_process: subprocess.Popen[bytes]) -> None:
    rank = os.pidfd_open(rank_of(engine_process))
    engine_process.kill()
    assert is_gone(rank, GONE_S)
    os.close(rank)


def test_idle_engine_ends_with_its_rank(engine_process: subprocess.Popen[bytes]) -> None:
    os.kill(rank_of(engine_process), signal.SIGKILL)
    assert engine_process.wait(GONE_S) == 1


def test_error_of_a_loading_rank_is_the_load_error_and_no_other_rank_is_started(folder: Path, tmp_path: Path) -> None:
    from triton_omni.backends.diffusion.options import read_options
    from triton_omni.backends.diffusion.parallel.ranks import RankGroup

    class Watched(RankGroup):
        started: list[int] = []

        def _start(self, rank: int, folder: Path) -> None:
            self.started.append(rank)
            super()._start(rank, folder)

    options = read_options({"model": "x", "parallel": {"cfg": 3}}, "denoiser")
    transformer = engine_of(folder).model.pipe.transformer
    with pytest.raises(OptionsError, match=r"parallel: rank 1 of 3 failed to load: .*nowhere"):
        Watched(tmp_path / "nowhere", options, torch.device("cpu"), transformer)
    assert Watched.started == [1]  # one after the other: host memory holds the weights of one
