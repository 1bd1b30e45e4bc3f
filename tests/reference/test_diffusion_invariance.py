# SPDX-License-Identifier: Apache-2.0
"""The same request and seed give the same image bytes, alone or in any batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.kit.tiny_edit import SOURCE_PIXELS, edit_run, hole, photo, save_tiny_edit
from tests.kit.tiny_image import ends, engine_of, finish, image_run, images_of, save_tiny_image
from triton_omni.backends.core.engine import EngineEvent, EngineFailed, Run

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(280), pytest.mark.bytes_exact]

PROMPTS = (
    "a red handwritten 7 on a white background",
    "3",
    "two",
    "a blue 5 on a yellow background and a small green cat with a sign that says hello",
    "a 9",
    "draw the number four in red on black",
)
SIDES = (32, 64, 64, 96, 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return save_tiny_image(tmp_path_factory.mktemp("image") / "tiny")


@pytest.fixture(scope="module")
def edit_folder(tmp_path_factory: pytest.TempPathFactory):
    return save_tiny_edit(tmp_path_factory.mktemp("edit") / "tiny")


@pytest.fixture(scope="module")
def several_folder(tmp_path_factory: pytest.TempPathFactory):
    return save_tiny_edit(tmp_path_factory.mktemp("edit") / "several", several=True)


@pytest.fixture(scope="module")
def zero_folder(tmp_path_factory: pytest.TempPathFactory):
    return save_tiny_edit(tmp_path_factory.mktemp("edit") / "zero", several=True, sources_at_zero=True)


@pytest.fixture(autouse=True)
def one_thread_afterwards():
    yield
    torch.set_num_threads(1)


def random_requests(count: int) -> list[dict[str, Any]]:
    rng = random.Random(5)
    found: list[dict[str, Any]] = []
    for seed in range(count):
        options: dict[str, Any] = {
            "width": rng.choice(SIDES), "height": rng.choice(SIDES), "steps": rng.randint(2, 9),
            "true_cfg_scale": rng.choice([1.0, 2.5, 4.0]), "seed": seed, "n": rng.choice([1, 1, 1, 2]),
            "partial_images": rng.choice([0, 0, 2]),
        }  # fmt: skip
        negative = rng.choice([None, " ", "orange"])
        if negative is not None:
            options["negative_prompt"] = negative
        found.append({"prompt": rng.choice(PROMPTS), **options})
    return found


def with_edits(asked: list[dict[str, Any]], several: bool) -> list[dict[str, Any]]:
    """The same, but two of three are edits: of one image, every other time with a mask, or of up to three."""
    found: list[dict[str, Any]] = []
    for number, one in enumerate(asked):
        if number % 3:
            width, height = one.pop("width"), one.pop("height")
            mask = hole(width, height) if number % 2 and not several else None
            count = 1 + number % 3 if several else 1
            one |= {"images": [photo(width, height, number % 4 + i) for i in range(count)], "mask": mask}
        found.append(one)
    return found


def make_run(one: dict[str, Any]) -> Run:
    return edit_run(**one) if "images" in one else image_run(**one)


def poison(run: Run, rng: random.Random) -> None:
    """Make the run fail at its next step, by an exception or by non-finite values."""
    latents = run.state.latents
    run.state.latents = torch.full_like(latents, float("nan")) if rng.random() < 0.5 else latents[:, :, :-1]


def randomized_lifecycle(
    engine: Any, asked: list[dict[str, Any]], rng: random.Random
) -> tuple[dict[int, Run], set[int], list[EngineEvent]]:
    """Random arrivals, aborts and failures; returns the runs, the undisturbed ones, and all events."""
    order = list(range(len(asked)))
    rng.shuffle(order)
    runs: dict[int, Run] = {}
    undisturbed: set[int] = set()
    events: list[EngineEvent] = []
    while order or engine.has_work:
        while order and rng.random() < 0.5:
            number = order.pop()
            runs[number] = make_run(asked[number])
            engine.open(runs[number])
            undisturbed.add(number)
        events += engine.step()
        running = [i for i in undisturbed if runs[i].state.is_prepared and runs[i].state.steps_left]
        if running and rng.random() < 0.08:
            victim = rng.choice(running)
            undisturbed.discard(victim)
            if rng.random() < 0.5:
                engine.stop(runs[victim])
            else:
                poison(runs[victim], rng)
    return runs, undisturbed, events


@pytest.mark.parametrize(
    ("threads", "count", "budgets"),
    [
        (1, 24, (150, 400, 1000, 100_000)),
        pytest.param(2, 24, (400, 100_000), marks=pytest.mark.soak),  # minutes where others use the cores, too
    ],
)
def test_image_bytes_do_not_depend_on_the_batch(folder, threads: int, count: int, budgets: tuple[int, ...]) -> None:
    compare(folder, random_requests(count), budgets, threads=threads)


@pytest.mark.parametrize("checkpoint", ["edit_folder", "several_folder", "zero_folder"])
def test_edit_bytes_do_not_depend_on_the_batch(request: pytest.FixtureRequest, checkpoint: str) -> None:
    asked = with_edits(random_requests(18), several=checkpoint != "edit_folder")
    defaults = {"source_pixels": SOURCE_PIXELS}
    compare(request.getfixturevalue(checkpoint), asked, (1000, 100_000), threads=1, defaults=defaults)


def compare(folder, asked: list[dict[str, Any]], budgets: tuple[int, ...], **deploy: Any) -> None:
    """Each request alone, then all of them in randomized lifecycles with other token budgets."""
    alone: list[list[bytes]] = []
    engine = engine_of(folder, **deploy)
    for one in asked:
        run = make_run(one)
        engine.open(run)
        alone.append([p.tobytes() for p in images_of(finish(engine), run)])
    compared = 0
    for trial, budget in enumerate(budgets):
        engine = engine_of(folder, max_batch_tokens=budget, **deploy)
        runs, undisturbed, events = randomized_lifecycle(engine, asked, random.Random(trial))
        assert len(runs) == len(asked)
        for number in undisturbed:
            drawn = [p.tobytes() for p in images_of(events, runs[number])]
            assert drawn == alone[number], f"trial {trial}, request {number}: {asked[number]}"
        for number in set(runs) - undisturbed:
            assert all(isinstance(end, EngineFailed) for end in ends(events, runs[number]))
        compared += len(undisturbed)
        assert engine._image_runs == engine._decodes == []
    assert 2 * compared > len(asked) * len(budgets)


def test_previews_do_not_change_the_image(folder) -> None:
    engine = engine_of(folder)
    found = []
    for partial in (0, 3):
        run = image_run("two", width=64, height=96, steps=9, seed=3, n=2, partial_images=partial)
        engine.open(run)
        found.append(np.stack(images_of(finish(engine), run)))
    assert np.array_equal(*found)
