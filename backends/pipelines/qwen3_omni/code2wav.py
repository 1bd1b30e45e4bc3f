# SPDX-License-Identifier: Apache-2.0
"""Stage `code2wav`: frames of codes to audio by transformers' network, which carries its state between chunks.

The network leaves out the first input of its overlapping transposed convolutions and cannot complete the last one, so
F frames give F * samples_per_frame - tail samples; the `tail` samples are missing at the first chunk.
"""

from __future__ import annotations

from typing import Any

from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from triton_omni.backends.ar.options import checkpoint_folder
from triton_omni.backends.codec.engine import CodecEngine
from triton_omni.backends.codec.streaming import streaming_engine, tensors_of
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.pipelines.qwen3_omni.checkpoints import config_of, require_speech


def make_code2wav(context: EngineContext) -> CodecEngine:
    """The engine of stage `code2wav`."""
    return streaming_engine(context, _load)


def _load(model: str, models_dir: str) -> Any:
    folder = checkpoint_folder(model, models_dir)
    config = require_speech(config_of(str(folder)), "code2wav")
    network: Any = Qwen3OmniMoeCode2Wav._from_config(config.code2wav_config)
    network.load_state_dict(tensors_of(folder, "code2wav."))
    return network
