# SPDX-License-Identifier: Apache-2.0
"""The graph of every model that draws: one stage, one output. Imported by the thin stub: no torch at the top."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from triton_omni.backends.core.chunk import TensorSpec
from triton_omni.backends.core.engine import Engine
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.pipeline import EngineContext, Operation, Output, Pipeline, Stage
from triton_omni.backends.diffusion.image_params import read_wish
from triton_omni.backends.diffusion.options import SIZE_MULTIPLE, Defaults, Limits

STAGE = "denoiser"

OUTERMOST = Limits(max_pixels=4096 * 4096, max_total_pixels=10 * 4096 * 4096)
"""No deploy file allows more than this; what it allows is checked by the engine when the run is opened."""


def drawing_pipeline(name: str, package_dir: str, about: Mapping[str, Any], max_pictures: int = 0) -> Pipeline:
    """Pipeline `name` around one denoiser, which may take pictures to edit; `package_dir` is where deploy's
    "package:…" models are."""
    inputs = (TensorSpec("image", "uint8", (-1,)),) if max_pictures else ()
    outputs = (TensorSpec("image", "uint8", (-1, -1, 3)),)
    operations = ("image", "chat", "edit") if max_pictures else ("image", "chat")
    return Pipeline(
        name=name,
        stages=(Stage(STAGE, partial(_engine, package_dir), inputs=inputs, outputs=outputs, params=("image",)),),
        edges=(),
        outputs=(Output("image", STAGE),),
        operations=tuple(Operation(operation, STAGE, ("image",)) for operation in operations),
        check=partial(check, msgspec.structs.replace(OUTERMOST, max_pictures=max_pictures)),
        about={"size_multiple": SIZE_MULTIPLE} | dict(about),
    )


def check(limits: Limits, request: GenerateRequest) -> None:
    """Refuse what no engine of such a pipeline can do, naming the field."""
    for stage in request.stages:
        if stage != STAGE:
            raise BadRequest(f"unknown stage '{stage}'; this pipeline has: {STAGE}", f"stages.{stage}")
    read_wish(request, STAGE, limits, Defaults())


def _engine(package_dir: str, context: EngineContext) -> Engine:
    from triton_omni.backends.diffusion.engine import DiffusionEngine  # torch and diffusers: only in the worker

    return DiffusionEngine(context, package_dir)
