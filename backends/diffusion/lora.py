# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the transformer: loaded by name when the stage starts, worn by one forward at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_omni.backends.core.engine import OptionsError


class Loras:
    """The adapters of one pipeline. All runs of a forward wear the same one, or none."""

    def __init__(self, pipe: Any, folders: Mapping[str, Path]) -> None:
        self.names = tuple(folders)
        self._transformer = pipe.transformer
        self._worn: tuple[str, float] | None = None
        for name, path in folders.items():
            if not path.exists():
                raise OptionsError(f"loras: '{name}': {path} is missing")
            try:
                pipe.load_lora_weights(path, adapter_name=name)
            except (ValueError, RuntimeError, OSError, KeyError) as error:
                raise OptionsError(f"loras: '{name}' does not fit this model: {error}") from error
            if name not in getattr(self._transformer, "peft_config", {}):  # diffusers only warns
                raise OptionsError(f"loras: '{name}' holds no weights for this model's transformer")
        self.wear("", 1.0)

    def wear(self, name: str, scale: float) -> None:
        """From now on the transformer computes with this adapter; "" is none."""
        if not self.names or self._worn == (name, scale):
            return
        if name:
            self._transformer.set_adapters(name, weights=scale)
            self._transformer.enable_lora()
        else:
            self._transformer.disable_lora()
        self._worn = (name, scale)
