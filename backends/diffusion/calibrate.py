# SPDX-License-Identifier: Apache-2.0
"""How many tokens one step should hold on this device: as many as still make a token cheaper.

Once a step fills the device, more tokens only make everybody finish later.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import torch

from backends.core.engine import Run
from backends.core.generate import GenerateRequest
from backends.diffusion.drawing import Drawing
from backends.diffusion.model import Model
from backends.diffusion.options import Wish

SIDE = 64
LARGEST = 32  # small pictures in one step
GOOD_ENOUGH = 1.15  # a token may cost this much of the best and the step be smaller: everybody finishes earlier
PATIENCE_S = 1.0  # a step that takes longer is full
TRIES = 5  # the best counts: whatever else a machine does only makes a step slower


def measured_budget(model: Model) -> int:
    """Tokens per step from a few timed steps of 1, 2, 4, … small pictures. Call in inference mode."""
    costs: dict[int, float] = {}
    count = 1
    while count <= LARGEST:
        costs[count] = _cost(model, count)
        if costs[count] * count > PATIENCE_S:
            break
        count *= 2
    best = min(costs.values())
    return min(c for c, cost in costs.items() if cost <= GOOD_ENOUGH * best) * _drawing(model).tokens


def _cost(model: Model, count: int) -> float:
    """Seconds per picture of one step of `count` pictures, the best of some."""
    batch = [_drawing(model) for _ in range(count)]
    for drawing in batch:
        model.prepare(drawing)
    return min(_timed(lambda: model.executor.predict(batch), model.device) for _ in range(TRIES)) / count


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


def _drawing(model: Model) -> Drawing:
    """A small picture of nothing."""
    ids = model.text.ids("calibration of the step engine")
    wish = Wish(
        prompt="", negative_prompt=None, width=SIDE, height=SIDE, steps=2, true_cfg_scale=1.0, seed=0, n=1,
        partial_images=0, guidance_scale=None,
    )  # fmt: skip
    tokens = wish.picture_tokens + model.text.count(ids)
    run = Run(uuid.uuid4().bytes, "calibration", GenerateRequest())
    return Drawing(run, wish, 0, ids, None, model.text.count(ids), tokens, 0)
