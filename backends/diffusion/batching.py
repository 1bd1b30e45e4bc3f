# SPDX-License-Identifier: Apache-2.0
"""The forward that the deploy file's `batching` names."""

from __future__ import annotations

from typing import Any

from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.diffusion.forward import Forward, OneByOne, Padded
from triton_omni.backends.diffusion.options import DiffusionOptions
from triton_omni.backends.diffusion.packed import Packed, lacks


def forward_of(transformer: Any, options: DiffusionOptions) -> Forward:
    """Raises OptionsError if this transformer cannot be packed."""
    if options.batching == "seq":
        return OneByOne(transformer)
    if options.batching == "pad":
        return Padded(transformer)
    problem = lacks(transformer)
    if problem:
        raise OptionsError(
            f"model '{options.model}' cannot be packed: {problem}; say `batching: pad` or `batching: seq`"
        )
    return Packed(transformer, options.threads)
