# SPDX-License-Identifier: Apache-2.0
"""Steps timed when loading, one picture alone and two together, for pictures of growing size (see weights.py)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import torch

from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.diffusion.image_params import Wish
from triton_omni.backends.diffusion.image_run import Drawing, Needs
from triton_omni.backends.diffusion.model import Model
from triton_omni.backends.diffusion.options import Limits
from triton_omni.backends.diffusion.step_cost import Measure, Weights

SIDES = (64, 128, 256, 512, 1024, 1536)
LONG_TEXT = 128  # tokens of a prompt at the last size, so that it holds with longer prompts, too
ENOUGH = 4.0  # what weighs so much shares a step with one other in queues of 8 and more: no need to know larger sizes
PATIENCE_S = 0.25  # sizes beyond one that takes so long are not tried: four times the size may take thirty times it
TRIES = 5  # the best counts: whatever else a machine does only makes a step slower


def measured_weights(model: Model, limits: Limits) -> Weights:
    """Weights from a few timed steps. Call in inference mode."""
    found = Weights.of_measures(list(_measures(model, limits)))
    model.forward.forget()
    return found


def _measures(model: Model, limits: Limits) -> Iterator[Measure]:
    found: list[Measure] = []
    for side in SIDES:
        if side * side > limits.max_pixels and found:
            break
        found.append(_measure(model, side))
        yield found[-1]
        if Weights.of_measures(found)(found[-1].tokens) >= ENOUGH:
            return
        if found[-1].pair_s > PATIENCE_S:
            break
    yield _measure(model, SIDES[len(found) - 1], LONG_TEXT)


def _measure(model: Model, side: int, text: int = 0) -> Measure:
    ranks = model.options.parallel.cfg  # a picture for each cost as much as one picture costs one rank
    pair = [_drawing(model, side, text) for _ in range(2 * ranks)]
    return Measure(ranks * pair[0].tokens, _cost(model, pair[:ranks]), _cost(model, pair))


def _cost(model: Model, batch: list[Drawing]) -> float:
    """Seconds of one step, the best of some."""
    best = _timed(lambda: model.forward.predict(batch), model.device)
    for _ in range(TRIES - 1 if best < PATIENCE_S else 1):
        best = min(best, _timed(lambda: model.forward.predict(batch), model.device))
    return best


def _timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        return time.perf_counter() - started
    started = time.process_time()  # other processes of a shared machine do not count
    work()
    return time.process_time() - started


def _drawing(model: Model, side: int, text: int) -> Drawing:
    """A prepared picture of nothing; its prompt has at least `text` tokens."""
    prompt = model.text.prompt("calibration of the step engine")
    wish = Wish(
        prompt="", negative_prompt=None, width=side, height=side, steps=2, true_cfg_scale=1.0, seed=0, n=1,
        partial_images=0, guidance_scale=None,
    )  # fmt: skip
    tokens = wish.picture_tokens + max(text, prompt.tokens)
    run = Run(uuid.uuid4().bytes, "calibration", GenerateRequest())
    drawing = Drawing(run, wish, 0, prompt, None, tokens, 0.0, 0, Needs(0, 0, 0))
    model.encode(drawing)
    model.prepare(drawing)
    assert drawing.positive is not None
    if text > prompt.tokens:
        drawing.positive = drawing.positive.repeat(1, -(-text // prompt.tokens), 1)[:, :text]
    return drawing
