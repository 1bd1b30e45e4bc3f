# SPDX-License-Identifier: Apache-2.0
"""vLLM's building blocks for out-of-tree models: what a pipeline's network definition may use of vLLM.

Pipelines take them from here, so that this package stays the only one that knows vLLM.
"""

from __future__ import annotations

from vllm.model_executor.models.interfaces import SupportsMRoPE, SupportsPP
from vllm.model_executor.models.qwen3 import Qwen3Model as Decoder
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel as MoeDecoder
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

__all__ = ["AutoWeightsLoader", "Decoder", "MoeDecoder", "SupportsMRoPE", "SupportsPP", "WeightsMapper", "maybe_prefix"]
