# SPDX-License-Identifier: Apache-2.0
"""How many tokens one step should hold on this device.

A step costs a fixed part (starting the kernels, what is done per row) and so much per token. Where a run's own tokens
cost as much as the fixed part, sharing a step stops making the average run earlier (see fairness.py).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import torch

from backends.core.engine import Run
from backends.core.generate import GenerateRequest
from backends.diffusion.drawing import Drawing
from backends.diffusion.fairness import JOIN
from backends.diffusion.model import Model
from backends.diffusion.options import Wish

SIDE = 64
LARGEST = 32  # small pictures in one step
MOST_TOKENS = 1 << 20  # a device that thirty pictures do not slow down at all
PATIENCE_S = 1.0  # a step that takes longer is full
TRIES = 5  # the best counts: whatever else a machine does only makes a step slower


def measured_budget(model: Model) -> int:
    """Tokens per step from a few timed steps of 1, 2, 4, … small pictures. Call in inference mode."""
    alone = _cost(model, 1)
    count, full = 1, alone
    while count < LARGEST and full < PATIENCE_S:
        count *= 2
        full = _cost(model, count)
    picture = max(0.0, full - alone) / max(1, count - 1)
    fixed = max(0.0, alone - picture)
    tokens = _drawing(model).tokens
    return max(1, round(JOIN * tokens * fixed / picture)) if picture else MOST_TOKENS


def _cost(model: Model, count: int) -> float:
    """Seconds of one step of `count` pictures, the best of some."""
    batch = [_drawing(model) for _ in range(count)]
    for drawing in batch:
        model.prepare(drawing)
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


def _drawing(model: Model) -> Drawing:
    """A small picture of nothing."""
    prompt = model.text.prompt("calibration of the step engine")
    wish = Wish(
        prompt="", negative_prompt=None, width=SIDE, height=SIDE, steps=2, true_cfg_scale=1.0, seed=0, n=1,
        partial_images=0, guidance_scale=None,
    )  # fmt: skip
    run = Run(uuid.uuid4().bytes, "calibration", GenerateRequest())
    return Drawing(run, wish, 0, prompt, None, wish.picture_tokens + prompt.count, 0)
