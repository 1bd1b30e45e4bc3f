# SPDX-License-Identifier: Apache-2.0
"""Measures the step cost at load: steps with one image and with two, for images of growing size (step_cost.py)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import torch

from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.diffusion.image_params import ImageSpec
from triton_omni.backends.diffusion.image_run import ImageRun, MemoryNeeds
from triton_omni.backends.diffusion.model import ImageModel
from triton_omni.backends.diffusion.options import ImageLimits
from triton_omni.backends.diffusion.step_cost import StepCost, StepTiming

SIDES = (64, 128, 256, 512, 1024, 1536)
LONG_TEXT = 128  # prompt tokens of the last timing, so that the cost also holds for longer prompts
ENOUGH = 4.0  # runs of this cost are batched by two only in queues of 8 and more: larger sizes need no measurement
MAX_STEP_S = 0.25  # larger sizes are skipped after a step of this length: four times the area may take thirty times it
TRIES = 5  # the fastest counts: other load only makes a step slower


def measure_step_cost(model: ImageModel, limits: ImageLimits) -> StepCost:
    """Step cost from a few timed steps. Call in inference mode."""
    cost = StepCost.from_timings(list(_timings(model, limits)))
    model.forward.forget()
    return cost


def _timings(model: ImageModel, limits: ImageLimits) -> Iterator[StepTiming]:
    timings: list[StepTiming] = []
    for side in SIDES:
        if side * side > limits.max_pixels and timings:
            break
        timings.append(_timing(model, side))
        yield timings[-1]
        if StepCost.from_timings(timings)(timings[-1].tokens) >= ENOUGH:
            return
        if timings[-1].pair_s > MAX_STEP_S:
            break
    yield _timing(model, SIDES[len(timings) - 1], LONG_TEXT)


def _timing(model: ImageModel, side: int, text_tokens: int = 0) -> StepTiming:
    ranks = model.options.parallel.cfg  # one image per rank costs as much as one image on one rank
    runs = [_prepared_run(model, side, text_tokens) for _ in range(2 * ranks)]
    return StepTiming(ranks * runs[0].tokens, _fastest_s(model, runs[:ranks]), _fastest_s(model, runs))


def _fastest_s(model: ImageModel, batch: list[ImageRun]) -> float:
    """Seconds of the fastest of some steps."""
    fastest_s = _time_s(lambda: model.forward.predict(batch), model.device)
    for _ in range(TRIES - 1 if fastest_s < MAX_STEP_S else 1):
        fastest_s = min(fastest_s, _time_s(lambda: model.forward.predict(batch), model.device))
    return fastest_s


def _time_s(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        return time.perf_counter() - started
    started = time.process_time()  # excludes other processes of a shared machine
    work()
    return time.process_time() - started


def _prepared_run(model: ImageModel, side: int, text_tokens: int) -> ImageRun:
    """A prepared run with a prompt of at least `text_tokens` tokens."""
    prompt = model.text.prompt("calibration of the step engine")
    spec = ImageSpec(
        prompt="", negative_prompt=None, width=side, height=side, steps=2, true_cfg_scale=1.0, seed=0, n=1,
        partial_images=0, guidance_scale=None,
    )  # fmt: skip
    image_run = ImageRun(
        run=Run(uuid.uuid4().bytes, "calibration", GenerateRequest()),
        spec=spec,
        seed=0,
        prompt=prompt,
        negative_prompt=None,
        tokens=spec.image_tokens + max(text_tokens, prompt.tokens),
        step_cost=0.0,
        arrival_tokens=0,
        needs=MemoryNeeds(0, 0, 0),
    )
    model.encode(image_run)
    model.prepare(image_run)
    assert image_run.positive is not None
    if text_tokens > prompt.tokens:
        copies = -(-text_tokens // prompt.tokens)
        image_run.positive = image_run.positive.repeat(1, copies, 1)[:, :text_tokens]
    return image_run
