# SPDX-License-Identifier: Apache-2.0
"""The `engine:` sections of this pipeline's own stages in deploy.yaml, typed; every default is here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.pipeline import EngineContext

MAX_AUDIO_S = 600.0


class TalkerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """model: folder of the speech codes' codebooks."""

    model: str


class Code2WavOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """model: folder of the codebooks; chunks: options of the codec engine (backends/codec/engine.py)."""

    model: str
    chunks: dict[str, object] = {}


class TranscriberOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the transcriber.

    model         folder of a Whisper model in CTranslate2's format
    threads       of one encoder or decoder pass
    compute_type  CTranslate2's: what the weights are computed in
    max_audio_s   longest audio of a request, all parts together
    """

    model: str
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    compute_type: Literal["float32", "float16", "bfloat16", "int8", "int8_float16", "int8_bfloat16"] = "int8"
    max_audio_s: Annotated[float, msgspec.Meta(gt=0)] = MAX_AUDIO_S


def model_folder(context: EngineContext, name: str) -> Path:
    """The folder of a model of this stage; raises OptionsError if it is not there."""
    folder = Path(context.models_dir, name)
    if not folder.is_dir():
        raise OptionsError(f"stage '{context.stage}': there is no model folder {folder}; set-up (make setup) builds it")
    return folder
