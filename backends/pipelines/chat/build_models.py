# SPDX-License-Identifier: Apache-2.0
"""Converts the weights of pipeline `chat` out of their packages; set-up calls it.

    python -m triton_omni.backends.pipelines.chat.build_models --packages DIR --out DIR

Each model is built in a draft folder and renamed when it is complete, so a folder that is there is whole; its file
BUILT says from what and by which recipe, and the same again does nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from triton_omni.backends.pipelines.chat import codebooks, smollm2, whisper

MARKER = "BUILT"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One model folder: what it is made of, and the version of the recipe (raise it when the result changes)."""

    name: str
    source: Path
    recipe: int
    build: Callable[[Path, Path], None]

    def mark(self, packages: Path) -> str:
        return f"{self.source.name} {(packages / self.source).stat().st_size} recipe {self.recipe}\n"


MODELS = (
    WeightSource("smollm2-135m-instruct", smollm2.GGUF, 1, smollm2.build),
    WeightSource("whisper-tiny-en", whisper.MODEL_BIN, 3, whisper.build),
    WeightSource("hibari-rvq", codebooks.NETWORK, 1, codebooks.build),
)


def ensure(model: WeightSource, packages: Path, out: Path) -> bool:
    """Build `model` unless it is there; True if it was built."""
    if not (packages / model.source).is_file():
        raise SystemExit(f"{packages / model.source} is missing: run set-up, which unpacks the packages")
    mark = model.mark(packages)
    folder = out / model.name
    marker = folder / MARKER
    if marker.is_file() and marker.read_text(encoding="utf-8") == mark:
        return False
    draft = out / f".{model.name}-{os.getpid()}"
    try:
        draft.mkdir(parents=True)
        model.build(packages, draft)
        (draft / MARKER).write_text(mark, encoding="utf-8")
        for file in draft.iterdir():
            file.chmod(0o644)  # safetensors writes for its owner alone; the server may be another user
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def main() -> None:
    """Build what is missing, a line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder with the unpacked packages")
    parser.add_argument("--out", type=Path, required=True, help="folder the models are written to")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the packages
    given.out.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        started_s = time.monotonic()
        print(f"{model.name} …", flush=True)
        built = ensure(model, given.packages, given.out)
        print(f"{model.name}: {f'built in {time.monotonic() - started_s:.0f} s' if built else 'there already'}")


if __name__ == "__main__":
    main()
