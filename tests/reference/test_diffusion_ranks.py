# SPDX-License-Identifier: Apache-2.0
"""One instance on several ranks, real processes joined by Gloo: the same pictures, and no end but one."""

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
from tests.kit.tiny_image import draw_latents, ends, engine_of, finish, image_run, pictures, save_tiny_image
from tests.reference.test_diffusion_invariance import life, make, requests
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
    """An engine with followers, which are gone afterwards."""
    engine = engine_of(folder, parallel=parallel, **options)
    followers = [os.pidfd_open(pid) for pid in engine.model.ranks.pids]
    try:
        yield engine
    finally:
        engine.close()
        for follower in followers:
            assert is_gone(follower, GONE_S)
            os.close(follower)


def drawn(engine: Any, runs: list[Any]) -> list[np.ndarray]:
    for run in runs:
        engine.open(run)
    events = finish(engine)
    return [picture for run in runs for picture in pictures(events, run)]


# --- the same pictures ---------------------------------------------------------------------------------------
def test_two_ranks_draw_the_bytes_of_one_in_any_company(folder: Path) -> None:
    same_bytes(folder, requests(24), (400, 100_000))


def test_two_ranks_edit_as_one(edit_folder: Path) -> None:
    asked = requests(12)
    for number, one in enumerate(asked):
        if number % 3:
            given = photo(one.pop("width"), one.pop("height"), number)
            one["pictures"] = [given, photo(40, 90, 2)][: number % 3]
    same_bytes(edit_folder, asked, (100_000,), defaults={"source_pixels": SOURCE_PIXELS})


def same_bytes(folder: Path, asked: list[dict[str, Any]], budgets: tuple[int, ...], **deploy: Any) -> None:
    """Each request alone on one rank, then all of them on two: joins, aborts and failures included."""
    alone = engine_of(folder, **deploy)
    expected = [[p.tobytes() for p in drawn(alone, [make(one)])] for one in asked]
    with ranks(folder, {"cfg": 2}, **deploy) as engine:
        for trial, budget in enumerate(budgets):
            engine.most_tokens = budget
            runs, undisturbed, events = life(engine, asked, random.Random(trial))
            assert len(runs) == len(asked) and 2 * len(undisturbed) > len(asked)
            for number in undisturbed:
                assert [p.tobytes() for p in pictures(events, runs[number])] == expected[number], asked[number]
            for number in set(runs) - undisturbed:
                assert all(isinstance(end, EngineFailed) for end in ends(events, runs[number]))


def test_a_rank_has_a_branch_and_a_request_that_fails_there_fails_alone(folder: Path) -> None:
    with ranks(folder, {"cfg": 2}) as engine:
        bad, good = (image_run("two", **GUIDED, steps=6, seed=seed) for seed in (1, 2))
        engine.open(bad)
        engine.open(good)
        while bad.state.step < 2:
            engine.step()
        held = [[(part.drawing.run, part.branch) for part in share] for share in engine.model.forward._shares]
        assert sorted(map(len, held)) == [2, 2]
        assert {run for run, _ in held[1]} == {bad, good}
        bad.state.latents = bad.state.latents[:, :, :-1]
        events = finish(engine)
        (end,) = ends(events, bad)
        assert isinstance(end, EngineFailed) and end.error.message.startswith("step 3 failed")
        again = image_run("two", **GUIDED, steps=6, seed=2)
        assert np.array_equal(pictures(events, good)[0], drawn(engine, [again])[0])


@pytest.mark.parametrize(("batching", "most_levels"), [("seq", 0), ("pad", 1)])
def test_stock_arithmetic_on_two_ranks(folder: Path, batching: str, most_levels: int) -> None:
    def runs() -> list[Any]:
        return [
            image_run("a red 7", **GUIDED, steps=5, seed=1, n=2),
            image_run("3", width=64, height=64, steps=4, seed=2),
        ]

    one = drawn(engine_of(folder, batching=batching), runs())
    with ranks(folder, {"cfg": 2}, batching=batching) as engine:
        for ours, theirs in zip(drawn(engine, runs()), one, strict=True):
            assert int(np.abs(ours.astype(int) - theirs.astype(int)).max()) <= most_levels


# --- context parallel ----------------------------------------------------------------------------------------
def test_two_ranks_share_the_tokens_of_a_picture(edit_folder: Path) -> None:
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
            found.append(draw_latents(one, runs())[0])
        for alone, shared in zip(*found, strict=True):
            assert float((alone - shared).abs().max()) <= 1e-5
        bad = image_run("two", width=64, height=64, steps=4, seed=1)
        engine.open(bad)
        while bad.state.step < 1:
            engine.step()
        bad.state.latents = bad.state.latents[:, :, :-1]
        assert [type(end) for end in ends(finish(engine), bad)] == [EngineFailed]  # on both ranks, which stay in step
        assert len(drawn(engine, [image_run("two", width=64, height=64, steps=2)])) == 1
        with pytest.raises(BadRequest, match="9 image tokens cannot be shared by 2 ranks") as caught:
            engine.open(image_run("two", width=48, height=48, steps=4))
        assert caught.value.where == "stages.denoiser.width"


def test_ring_attention_is_refused_where_it_cannot_run(folder: Path) -> None:
    with pytest.raises(OptionsError, match=r"parallel: kind: ring: .*GPUs only"):
        engine_of(folder, parallel={"context": 2, "kind": "ring"}, batching="seq", dtype="bfloat16")
    q = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError):  # what diffusers calls for it; its default says nothing of what it saw
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)


def test_heads_that_cannot_be_shared_are_named(folder: Path) -> None:
    with pytest.raises(OptionsError, match=r"parallel: kind: ulysses: 2 attention heads .* by 3"):
        engine_of(folder, parallel={"context": 3}, batching="seq")


# --- ends ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("parallel", [{"cfg": 2}, {"context": 2}])
def test_a_follower_that_dies_ends_the_step_with_one_clear_error(folder: Path, parallel: dict[str, Any]) -> None:
    with ranks(folder, parallel, batching="seq") as engine:
        fails(engine, signal.SIGKILL, "rank 1 of 2 died by SIGKILL")


def test_a_follower_that_hangs_is_taken_for_dead(folder: Path) -> None:
    with ranks(folder, {"cfg": 2, "answer_s": 5}) as engine:
        fails(engine, signal.SIGSTOP, "rank 1 of 2 has not answered within 5 s")


def fails(engine: Any, number: signal.Signals, says: str) -> None:
    """The engine's step says what happened to the follower; the worker's loop makes it every run's end."""
    run = image_run("two", **GUIDED, steps=50, seed=1)
    engine.open(run)
    while run.state.step < 2:
        engine.step()
    os.kill(engine.model.ranks.pids[0], number)
    with pytest.raises(StageFailed, match=says):
        finish(engine)


LEADER = """
import sys
from pathlib import Path
from tests.kit.tiny_image import engine_of
engine = engine_of(Path(sys.argv[1]), parallel={"cfg": 2})
print(*engine.model.ranks.pids, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def leader(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An engine in a process of its own that waits; its first line names its followers."""
    with subprocess.Popen(
        [sys.executable, "-c", LEADER, str(folder)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield process
        process.kill()


def follower_of(leader: subprocess.Popen[bytes]) -> int:
    assert leader.stdout is not None
    return int(leader.stdout.readline())


def test_no_follower_outlives_its_leader(leader: subprocess.Popen[bytes]) -> None:
    follower = os.pidfd_open(follower_of(leader))
    leader.kill()
    assert is_gone(follower, GONE_S)
    os.close(follower)


def test_an_idle_leader_ends_with_its_follower(leader: subprocess.Popen[bytes]) -> None:
    os.kill(follower_of(leader), signal.SIGKILL)
    assert leader.wait(GONE_S) == 1


def test_what_keeps_a_follower_from_loading_is_the_load_error_and_no_other_is_started(
    folder: Path, tmp_path: Path
) -> None:
    from triton_omni.backends.diffusion.options import read_options
    from triton_omni.backends.diffusion.parallel.ranks import Ranks

    class Watched(Ranks):
        started: list[int] = []

        def _start(self, rank: int, folder: Path) -> None:
            self.started.append(rank)
            super()._start(rank, folder)

    options = read_options({"model": "x", "parallel": {"cfg": 3}}, "denoiser")
    transformer = engine_of(folder).model.pipe.transformer
    with pytest.raises(OptionsError, match=r"parallel: rank 1 of 3 did not load: .*nowhere"):
        Watched(tmp_path / "nowhere", options, torch.device("cpu"), transformer)
    assert Watched.started == [1]  # one after the other: host memory holds the weights of one
