# SPDX-License-Identifier: Apache-2.0
"""Images of the shipped model match their prompts, as classified by a reader trained on held-out real digits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.tiny_image import engine_of, finish, image_run, images_of, save_tiny_image
from triton_omni.backends.pipelines.image import pipeline
from triton_omni.backends.tools.digits import data

pytest.importorskip("torch")
pytestmark = [pytest.mark.models, pytest.mark.timeout(280)]

MODEL = Path(pipeline.__file__).with_name("digits")
IMAGES = 100
STEPS = {"steps": 12, "true_cfg_scale": 2.5, "negative_prompt": " "}


@pytest.fixture(scope="module")
def reader() -> data.Reader:
    return data.held_out_reader()


@pytest.fixture(scope="module")
def engine() -> Any:
    return engine_of(MODEL, step_overhead_tokens=256)


def readings(engine: Any, reader: data.Reader, prompts: Iterable[str], size: tuple[int, int]) -> list[data.Reading]:
    """Generate images for all prompts in one batch and read them."""
    runs = [image_run(prompt, width=size[0], height=size[1], seed=seed, **STEPS) for seed, prompt in enumerate(prompts)]
    for run in runs:
        engine.open(run)
    events = finish(engine, most_steps=20_000)
    return [reader.read(images_of(events, run)[0]) for run in runs]


def test_reader_recognizes_real_digits(reader: data.Reader) -> None:
    with np.load(data.HELD_OUT) as held_out:
        digits, labels = held_out["digits"], held_out["labels"]
    half = len(digits) // 2
    student = data.Reader(digits[:half], labels[:half])
    right = [student.digit(d.astype(np.float32)) == n for d, n in zip(digits[half:], labels[half:], strict=True)]
    assert np.mean(right) >= 0.95


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (128, 128)])
def test_digits_and_colors_match_the_prompts(engine: Any, reader: data.Reader, size: tuple[int, int]) -> None:
    prompts, wanted = zip(*data.evaluation_set(IMAGES), strict=True)
    seen = readings(engine, reader, prompts, size)
    digits = np.mean([s.digit == w.digit for s, w in zip(seen, wanted, strict=True)])
    colors = np.mean([s[1:] == w[1:] for s, w in zip(seen, wanted, strict=True)])
    assert digits >= 0.95, f"digits {digits}"
    assert colors >= 0.98, f"colors {colors}"


def test_a_red_seven_on_yellow(engine: Any, reader: data.Reader) -> None:
    seen = readings(engine, reader, ["a red 7 on a yellow background"] * 10, (64, 64))
    assert seen.count(data.Reading(7, "red", "yellow")) >= 9


def test_random_model_fails_the_evaluation(tmp_path: Path, reader: data.Reader) -> None:
    prompts, wanted = zip(*data.evaluation_set(40), strict=True)
    seen = readings(engine_of(save_tiny_image(tmp_path / "tiny")), reader, prompts, (64, 64))
    assert np.mean([s.digit == w.digit for s, w in zip(seen, wanted, strict=True)]) <= 0.3
    assert np.mean([s[1:] == w[1:] for s, w in zip(seen, wanted, strict=True)]) <= 0.2
