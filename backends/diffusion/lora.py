# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the transformer: loaded by name when the stage starts, one active per forward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.diffusion.upstream import DiffusionPipeline


class LoraAdapters:
    """The adapters of one pipeline. All runs of a forward use the same one, or none."""

    def __init__(self, pipe: DiffusionPipeline, folders: Mapping[str, Path]) -> None:
        self.names = tuple(folders)
        self._transformer = pipe.transformer
        self._active: tuple[str, float] | None = None
        for name, path in folders.items():
            if not path.exists():
                raise OptionsError(f"loras: '{name}': {path} does not exist")
            try:
                pipe.load_lora_weights(path, adapter_name=name)
            except (ValueError, RuntimeError, OSError, KeyError) as error:
                raise OptionsError(f"loras: '{name}' does not fit this model: {error}") from error
            if name not in getattr(self._transformer, "peft_config", {}):  # diffusers only warns
                raise OptionsError(f"loras: '{name}' holds no weights for this model's transformer")
        self.activate("", 1.0)

    def activate(self, name: str, scale: float) -> None:
        """Use this adapter from now on; "" is none."""
        if not self.names or self._active == (name, scale):
            return
        if name:
            self._transformer.set_adapters(name, weights=scale)
            self._transformer.enable_lora()
        else:
            self._transformer.disable_lora()
        self._active = (name, scale)
