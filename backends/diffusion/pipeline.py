# SPDX-License-Identifier: Apache-2.0
"""The graph of every image model: one stage, one output. Imported by the stub: no torch at module level."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from triton_omni.backends.core.chunk import TensorSpec
from triton_omni.backends.core.engine import Engine
from triton_omni.backends.core.generate import GenerateRequest
from triton_omni.backends.core.pipeline import EngineContext, Operation, Output, Pipeline, Stage
from triton_omni.backends.diffusion.image_params import resolve
from triton_omni.backends.diffusion.options import SIZE_MULTIPLE, ImageDefaults, ImageLimits

STAGE = "denoiser"


def image_pipeline(name: str, package_dir: str, about: Mapping[str, object], max_source_images: int = 0) -> Pipeline:
    """Pipeline `name` with one denoiser stage. `package_dir` is the folder of "package:…" models in deploy files;
    `max_source_images` > 0 adds the operation "edit"."""
    inputs = (TensorSpec("image", "uint8", (-1,)),) if max_source_images else ()
    outputs = (TensorSpec("image", "uint8", (-1, -1, 3)),)
    operations = ("image", "chat", "edit") if max_source_images else ("image", "chat")
    engine, own_check = partial(_engine, package_dir), partial(check, max_source_images)
    return Pipeline(
        name=name,
        stages=(Stage(STAGE, engine, inputs=inputs, outputs=outputs, params=("image",), check=own_check),),
        edges=(),
        outputs=(Output("image", STAGE),),
        operations=tuple(Operation(operation, STAGE, ("image",)) for operation in operations),
        about={"size_multiple": SIZE_MULTIPLE} | dict(about),
    )


def check(max_source_images: int, request: GenerateRequest, engine: Mapping[str, object]) -> None:
    """Apply the deploy file's limits; raises BadRequest naming the field."""
    limits = msgspec.convert(engine.get("limits", {}), ImageLimits)
    limits = msgspec.structs.replace(limits, max_source_images=min(max_source_images, limits.max_source_images))
    resolve(request, STAGE, limits, msgspec.convert(engine.get("defaults", {}), ImageDefaults))


def _engine(package_dir: str, context: EngineContext) -> Engine:
    from triton_omni.backends.diffusion.engine import DiffusionEngine  # torch and diffusers: only in the worker

    return DiffusionEngine(context, package_dir)
