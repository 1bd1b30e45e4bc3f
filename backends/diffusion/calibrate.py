# SPDX-License-Identifier: Apache-2.0
"""What a run adds to a step on this device, over what any step costs: its weight (see fairness.py).

A step costs a fixed part (starting the kernels, what is done per row) and so much for each token, more where
attention is long or the device is full. Both are measured when loading, for pictures of growing size, one alone and two
together: the second adds its *marginal* cost, and sharing saves twice the one minus both.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import torch

from backends.core.engine import Run
from backends.core.generate import GenerateRequest
from backends.diffusion.drawing import Drawing
from backends.diffusion.model import Model
from backends.diffusion.options import Limits
from backends.diffusion.wish import Wish

SIDES = (64, 128, 256, 512, 1024)
PATIENCE_S = 0.1  # sizes beyond one that takes so long are not tried: four times the size may take thirty times it
TRIES = 5  # the best counts: whatever else a machine does only makes a step slower
MARGIN = 0.8  # measurements differ by so much; a run that is near the line goes alone


@dataclass(frozen=True)
class Weights:
    """Weight by tokens: (tokens, weight) as measured, by tokens. Between two points the line, below the first and
    beyond the last in proportion."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of_overhead(cls, tokens: int) -> Weights:
        """For a device whose steps cost as much as so many tokens, whatever is in them."""
        return cls(((tokens, 1.0),))

    def __call__(self, tokens: float) -> float:
        before = (0.0, 0.0)
        for point in self.points:
            if tokens <= point[0]:
                return before[1] + (point[1] - before[1]) * (tokens - before[0]) / (point[0] - before[0])
            before = point
        return before[1] * tokens / before[0]

    def __str__(self) -> str:
        return ", ".join(f"{tokens:.0f} tokens {weight:.2f}" for tokens, weight in self.points)


def measured_weights(model: Model, limits: Limits) -> Weights:
    """Weights from a few timed steps. Call in inference mode."""
    points: list[tuple[float, float]] = []
    saved_least = math.inf
    for side in SIDES:
        if side * side > limits.max_pixels and points:
            break
        drawings = [_drawing(model, side) for _ in range(2)]
        alone, pair = _cost(model, drawings[:1]), _cost(model, drawings)
        saved_least = min(saved_least, MARGIN * (2 * alone - pair))
        weight = max(0.0, pair - alone) / saved_least if saved_least > 0 else math.inf
        points.append((drawings[0].tokens, max(weight, points[-1][1] if points else 0.0)))
        if pair > PATIENCE_S or weight == math.inf:
            break
    return Weights(tuple(points))


def _cost(model: Model, batch: list[Drawing]) -> float:
    """Seconds of one step, the best of some."""
    return min(_timed(lambda: model.forward.predict(batch), model.device) for _ in range(TRIES))


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


def _drawing(model: Model, side: int) -> Drawing:
    """A prepared picture of nothing."""
    prompt = model.text.prompt("calibration of the step engine")
    wish = Wish(
        prompt="", negative_prompt=None, width=side, height=side, steps=2, true_cfg_scale=1.0, seed=0, n=1,
        partial_images=0, guidance_scale=None,
    )  # fmt: skip
    run = Run(uuid.uuid4().bytes, "calibration", GenerateRequest())
    drawing = Drawing(run, wish, 0, prompt, None, wish.picture_tokens + prompt.tokens, 0.0, 0)
    model.prepare(drawing)
    return drawing
