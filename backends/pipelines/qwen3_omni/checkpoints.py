# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's own config, or a load error that says what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import AutoConfig

from triton_omni.backends.ar.options import checkpoint, read_options
from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.pipeline import EngineContext

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODEL_TYPE = "qwen3_omni_moe"


def omni_config(context: EngineContext) -> PreTrainedConfig:
    """Config of the checkpoint that an AR stage's options name."""
    return config_of(checkpoint(read_options(context.options, context.stage), context.models_dir))


def config_of(model: str) -> PreTrainedConfig:
    """Config of a folder, or of a name on a hub; raises OptionsError if it is another family's or unreadable."""
    try:
        config = AutoConfig.from_pretrained(model)
    except (ValueError, OSError, KeyError) as error:
        raise OptionsError(f"model '{model}': its config.json cannot be read: {error}") from None
    if config.model_type != MODEL_TYPE:
        raise OptionsError(f"model '{model}' is of the type '{config.model_type}', this pipeline needs '{MODEL_TYPE}'")
    return config


def speaking_config(context: EngineContext) -> PreTrainedConfig:
    """The same for a stage of the voice; raises OptionsError for a checkpoint without one."""
    return require_speech(omni_config(context), context.stage)


def require_speech(config: PreTrainedConfig, stage: str) -> PreTrainedConfig:
    """The config; raises OptionsError if the checkpoint has no voice."""
    if not config.enable_audio_output:
        raise OptionsError(
            f"stage '{stage}': the checkpoint does not speak (enable_audio_output is false); the pipeline "
            "qwen3_omni_text serves it"
        )
    return config
