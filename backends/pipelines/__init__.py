# SPDX-License-Identifier: Apache-2.0
"""One folder per model family. Nothing outside a folder names its model; nothing here lists them."""

from __future__ import annotations

import importlib
import re

from triton_omni.backends.core.pipeline import Pipeline

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def load(name: str) -> Pipeline:
    """The pipeline of folder `name`; raises LookupError if there is none."""
    if not _NAME.fullmatch(name):
        raise LookupError(f"'{name}' is not a pipeline name")
    try:
        module = importlib.import_module(f"triton_omni.backends.pipelines.{name}.pipeline")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith(f"triton_omni.backends.pipelines.{name}"):
            raise LookupError(f"there is no pipeline '{name}'") from None
        raise
    pipeline: Pipeline = module.PIPELINE
    return pipeline
