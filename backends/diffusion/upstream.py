# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - the imports below must come after the call
"""The only file that imports diffusers and transformers, and works around their defects."""

from __future__ import annotations

import importlib
import logging
import sys

__all__ = [
    "FBC_LEADER",
    "PRETOKENIZE_REGEX",
    "AutoModel",
    "AutoencoderKLQwenImage",
    "BatchFeature",
    "ContextParallelConfig",
    "DiagonalGaussianDistribution",
    "DiffusionPipeline",
    "FirstBlockCacheConfig",
    "FlowMatchEulerDiscreteScheduler",
    "ModelMixin",
    "ParallelConfig",
    "Qwen2Tokenizer",
    "Qwen2_5_VLConfig",
    "Qwen2_5_VLForConditionalGeneration",
    "QwenImageCausalConv3d",
    "QwenImageEditInpaintPipeline",
    "QwenImageEditPipeline",
    "QwenImageEditPlusPipeline",
    "QwenImagePipeline",
    "QwenImageTransformer2DModel",
    "apply_context_parallel",
    "apply_rotary_emb_qwen",
    "calculate_shift",
]  # fmt: skip

log = logging.getLogger("triton_omni.diffusion")

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def hide_broken_companions() -> None:
    """Make torch's companion packages look absent if they do not fit it.

    Package managers pair the CPU build of torch with CUDA builds of its companions, whose libraries then fail to
    load; transformers and diffusers use them if they are installed ("operator torchvision::nms does not
    exist"). The diffusion package does not need them.
    """
    for name in COMPANIONS:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        except (RuntimeError, OSError) as error:
            log.info("%s does not fit the installed torch and is ignored: %s", name, str(error).splitlines()[0])
            for loaded in [n for n in sys.modules if n.partition(".")[0] == name]:
                del sys.modules[loaded]
            sys.modules[name] = None  # type: ignore[assignment]  # a None entry makes the import fail


hide_broken_companions()

from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.hooks.first_block_cache import _FBC_LEADER_BLOCK_HOOK as FBC_LEADER
from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.auto_model import AutoModel
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage, QwenImageCausalConv3d
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel, apply_rotary_emb_qwen
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline, calculate_shift
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import QwenImageEditPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_inpaint import QwenImageEditInpaintPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import QwenImageEditPlusPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.utils import logging as diffusers_logging
from transformers.feature_extraction_utils import BatchFeature
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX, Qwen2Tokenizer
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging as transformers_logging


def be_quiet() -> None:
    """Keep their progress bars out of the logs."""
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
