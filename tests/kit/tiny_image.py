# SPDX-License-Identifier: Apache-2.0
"""A tiny random QwenImagePipeline on disk, and an engine over it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triton_omni.backends.core.engine import EngineEvent, EngineFailed, EngineFinished, EngineOutput, Run
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.ids import new_run_id
from triton_omni.backends.core.outputs import ImagePiece
from triton_omni.backends.core.pipeline import EngineContext

STAGE = "denoiser"


def save_tiny_image(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint (3.5 MB, diffusers layout); equal seeds give equal weights."""
    from triton_omni.backends.tools.digits.small_model import make_pipeline

    make_pipeline(seed=seed).save_pretrained(folder)
    return folder


def engine_of(folder: Path, device: str = "cpu", **options: Any) -> Any:
    """A diffusion engine with these engine options; by default all runs are batched."""
    from triton_omni.backends.diffusion.engine import DiffusionEngine

    given = {"model": str(folder), "step_overhead_tokens": 100_000} | options
    return DiffusionEngine(EngineContext("image", STAGE, given, device))


def image_run(prompt: str, **options: Any) -> Run:
    """A run of operation "image" with these stage options."""
    request = GenerateRequest(operation="image", input=prompt, stages={STAGE: options})
    run_id = new_run_id()
    return Run(run_id, run_id.hex()[:8], request, wanted=frozenset({"image"}))


def finish(engine: Any, most_steps: int = 2000) -> list[EngineEvent]:
    """Step until the engine has no work; returns the events in order."""
    events: list[EngineEvent] = []
    for _ in range(most_steps):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError(f"still has work after {most_steps} steps")


def generate_latents(engine: Any, runs: Sequence[Run]) -> tuple[list[Any], list[EngineEvent]]:
    """Run all to the end; returns the latents of each after its last step, and the events in order."""
    for run in runs:
        engine.open(run)
    latents: dict[bytes, Any] = {}
    events: list[EngineEvent] = []
    while engine.has_work:
        events += engine.step()
        latents |= {run.id: run.state.latents for run in runs if not run.state.steps_left}
    return [latents[run.id] for run in runs], events


def images_of(events: Iterable[EngineEvent], run: Run) -> list[np.ndarray]:
    """The run's final images, by index."""
    outputs = [(e.piece, e.tensors[0].data) for e in events if isinstance(e, EngineOutput) and e.run is run]
    final = [(p.index, np.asarray(data)) for p, data in outputs if isinstance(p, ImagePiece) and not p.partial]
    assert [index for index, _ in final] == list(range(len(final)))
    return [image for _, image in final]


def ends(events: Iterable[EngineEvent], run: Run) -> list[EngineFinished | EngineFailed]:
    """The run's terminal events."""
    return [e for e in events if isinstance(e, EngineFinished | EngineFailed) and e.run is run]
