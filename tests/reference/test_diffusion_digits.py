# SPDX-License-Identifier: Apache-2.0
"""The shipped model draws what it is asked for, as read by somebody who saw only real digits that it never saw."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.tiny_image import engine_of, finish, image_run, pictures, save_tiny_image
from triton_omni.backends.tools.digits import data

pytest.importorskip("torch")
pytestmark = [pytest.mark.models, pytest.mark.timeout(280)]

FOLDER = Path(data.__file__).parent
DRAWN = 100
STEPS = {"steps": 12, "true_cfg_scale": 2.5, "negative_prompt": " "}


@pytest.fixture(scope="module")
def reader() -> data.Reader:
    with np.load(FOLDER / "digits_held_out.npz") as held_out:
        return data.Reader(held_out["digits"], held_out["labels"])


@pytest.fixture(scope="module")
def engine() -> Any:
    return engine_of(FOLDER / "digits", step_overhead_tokens=256)


def readings(engine: Any, reader: data.Reader, prompts: Iterable[str], size: tuple[int, int]) -> list[data.Reading]:
    """Draw all prompts in one engine life, and read the pictures."""
    runs = [image_run(prompt, width=size[0], height=size[1], seed=seed, **STEPS) for seed, prompt in enumerate(prompts)]
    for run in runs:
        engine.open(run)
    events = finish(engine, most_steps=20_000)
    return [reader.read(pictures(events, run)[0]) for run in runs]


def test_the_reader_knows_real_digits(reader: data.Reader) -> None:
    with np.load(FOLDER / "digits_held_out.npz") as held_out:
        digits, labels = held_out["digits"], held_out["labels"]
    half = len(digits) // 2
    student = data.Reader(digits[:half], labels[:half])
    right = [student.digit(d.astype(np.float32)) == n for d, n in zip(digits[half:], labels[half:], strict=True)]
    assert np.mean(right) >= 0.95


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (128, 128)])
def test_digits_and_colours_are_what_was_asked_for(engine: Any, reader: data.Reader, size: tuple[int, int]) -> None:
    prompts, wanted = zip(*data.evaluation_set(DRAWN), strict=True)
    seen = readings(engine, reader, prompts, size)
    digits = np.mean([s.digit == w.digit for s, w in zip(seen, wanted, strict=True)])
    colours = np.mean([s[1:] == w[1:] for s, w in zip(seen, wanted, strict=True)])
    assert digits >= 0.95, f"digits {digits}"
    assert colours >= 0.98, f"colours {colours}"


def test_a_red_seven_on_yellow(engine: Any, reader: data.Reader) -> None:
    seen = readings(engine, reader, ["a red 7 on a yellow background"] * 10, (64, 64))
    assert seen.count(data.Reading(7, "red", "yellow")) >= 9


def test_a_random_model_is_not_mistaken_for_a_good_one(tmp_path: Path, reader: data.Reader) -> None:
    prompts, wanted = zip(*data.evaluation_set(40), strict=True)
    seen = readings(engine_of(save_tiny_image(tmp_path / "tiny")), reader, prompts, (64, 64))
    assert np.mean([s.digit == w.digit for s, w in zip(seen, wanted, strict=True)]) <= 0.3
    assert np.mean([s[1:] == w[1:] for s, w in zip(seen, wanted, strict=True)]) <= 0.2
