# SPDX-License-Identifier: Apache-2.0
"""Packed batching: any mix of sizes, prompts and guidance in one forward, without padding or masks.

All image tokens form one sequence and all text tokens another. Operations per token (projections, norms, feed-forward)
run once over these sequences. Attention runs per row, over that row's text and image tokens. The modulation depends on
a row's timestep: it is computed per row and gathered to tokens. Models with `zero_cond_t` see source images at time
zero, which takes a second modulation row per row.

Batch invariance. On a CPU the kernel of a matrix product, and so its rounding, depends on the number of rows, and for
the last rows on their position. This is the only place where the bits of a row could depend on the rest of the batch.
So every product here has its rows filled up with zeros to a number for which that is not so (RowBlocks).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from triton_omni.backends.diffusion.forward import BatchRow, ForwardInput, Prediction, regroup, rows_of
from triton_omni.backends.diffusion.upstream import ModelMixin, apply_rotary_emb_qwen


class RowBlocks(NamedTuple):
    """Rows of a product are filled up to a multiple of `unit`, at least `least`, and computed `block` at a time.

    Chosen by measurement of MKL's kernels for SSE, AVX2 and AVX-512: these give every row equal bits, whatever its
    position and the number of rows. With several threads that holds for blocks of one size only.
    """

    unit: int
    least: int
    block: int

    @classmethod
    def of_tokens(cls, threads: int) -> RowBlocks:
        """For products with a row per token."""
        return cls(12, 72, sys.maxsize) if threads == 1 else cls(192, 192, 192)


IMAGE_ROWS = RowBlocks(16, 16, 16)
"""For products with a row per image: few rows."""
IMAGE_PARTS = ("img_mod", "txt_mod", "time_text_embed", "norm_out")

PARTS = ("img_in", "txt_in", "txt_norm", "time_text_embed", "pos_embed", "transformer_blocks", "norm_out", "proj_out")
BLOCK_PARTS = (
    "img_mod", "img_norm1", "img_norm2", "img_mlp", "txt_mod", "txt_norm1", "txt_norm2", "txt_mlp", "attn",
)  # fmt: skip
ATTENTION_PARTS = (
    "to_q", "to_k", "to_v", "to_out", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    "norm_q", "norm_k", "norm_added_q", "norm_added_k",
)  # fmt: skip


def unsupported_reason(transformer: ModelMixin) -> str:
    """Why this transformer cannot be packed; empty if it can."""
    config = transformer.config
    if config.get("guidance_embeds") or config.get("use_additional_t_cond"):
        return "it is conditioned on more than text and time"
    missing = [p for p in PARTS if not hasattr(transformer, p)]
    if not missing:
        block = transformer.transformer_blocks[0]
        missing = [p for p in BLOCK_PARTS if not hasattr(block, p)]
        missing = missing or [p for p in ATTENTION_PARTS if getattr(block.attn, p, None) is None]
    return f"it has no {', '.join(missing)}" if missing else ""


@dataclass(eq=False, kw_only=True)
class PackedLayout:
    """What stays the same while the same inputs step together.

    image_rows, text_rows    modulation row of each token
    image_table, text_table  rotary tables of all image tokens and of all text tokens
    prompt                   projected text features (1, text tokens, dim)
    """

    inputs: tuple[ForwardInput, ...]
    rows: list[BatchRow]
    image_lengths: list[int]
    text_lengths: list[int]
    image_rows: torch.Tensor
    text_rows: torch.Tensor
    image_table: torch.Tensor
    text_table: torch.Tensor
    prompt: torch.Tensor

    def matches(self, inputs: Sequence[ForwardInput]) -> bool:
        """True if these are the same objects in the same order."""
        return len(inputs) == len(self.inputs) and all(a is b for a, b in zip(inputs, self.inputs, strict=True))


class PackedForward:
    """The transformer's own modules, applied to packed sequences."""

    def __init__(self, transformer: ModelMixin, threads: int) -> None:
        self._model = transformer
        if transformer.device.type == "cpu":
            for name, module in transformer.named_modules():
                if isinstance(module, nn.Linear):
                    per_image = not {*name.split(".")}.isdisjoint(IMAGE_PARTS)
                    blocks = IMAGE_ROWS if per_image else RowBlocks.of_tokens(threads)
                    module.forward = partial(_linear_in_blocks, module, blocks)
        self._head_dim: int = transformer.config.attention_head_dim
        self._sources_at_zero = bool(transformer.config.get("zero_cond_t"))
        self._layout: PackedLayout | None = None

    def predict(self, inputs: Sequence[ForwardInput]) -> list[Prediction]:
        if self._layout is None or not self._layout.matches(inputs):
            self._layout = self._make_layout(inputs)
        return regroup(inputs, self._forward(self._layout))

    def forget(self) -> None:
        """Drop the cached layout."""
        self._layout = None

    # --- layout --------------------------------------------------------------------------------------------------
    def _make_layout(self, inputs: Sequence[ForwardInput]) -> PackedLayout:
        model = self._model
        rows = rows_of(inputs)
        grid_lengths = [[prod(grid) for grid in row.source.grids] for row in rows]
        text_lengths = [row.features.shape[1] for row in rows]
        device = rows[0].features.device
        tables = [
            model.pos_embed([list(row.source.grids)], max_txt_seq_len=length, device=device)
            for row, length in zip(rows, text_lengths, strict=True)
        ]
        features = torch.cat([row.features[0] for row in rows])
        source_offset = len(rows) if self._sources_at_zero else 0
        return PackedLayout(
            inputs=tuple(inputs),
            rows=rows,
            image_lengths=[sum(lengths) for lengths in grid_lengths],
            text_lengths=text_lengths,
            image_rows=_repeat(
                [index for row in range(len(rows)) for index in (row, row + source_offset)],
                [tokens for image, *sources in grid_lengths for tokens in (image, sum(sources))],
                device,
            ),
            text_rows=_repeat(range(len(rows)), text_lengths, device),
            image_table=torch.cat([image for image, _ in tables]),
            text_table=torch.cat([text for _, text in tables]),
            prompt=model.txt_in(model.txt_norm(features))[None],
        )

    # --- forward -------------------------------------------------------------------------------------------------
    def _forward(self, layout: PackedLayout) -> Sequence[torch.Tensor]:
        """Velocities, (image and source tokens, channels) per row."""
        model = self._model
        latents = torch.cat([row.source.model_input()[row.image] for row in layout.rows])
        times = torch.stack([row.source.timestep() for row in layout.rows]).to(latents.dtype) / 1000
        if self._sources_at_zero:
            times = torch.cat([times, times * 0])
        image = model.img_in(latents)[None]
        time = model.time_text_embed(times, image)
        text = layout.prompt
        for block in model.transformer_blocks:
            image, text = self._block(block, image, text, time, layout)
        scale, shift = model.norm_out.linear(model.norm_out.silu(time).to(image.dtype)).chunk(2, dim=1)
        rows = layout.image_rows
        image = model.norm_out.norm(image) * (1 + scale[rows][None]) + shift[rows][None]
        return model.proj_out(image)[0].split(layout.image_lengths)

    def _block(
        self, block: Any, image: torch.Tensor, text: torch.Tensor, time: torch.Tensor, layout: PackedLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One dual-stream block."""
        image_first, image_second = block.img_mod(time).chunk(2, -1)
        text_first, text_second = block.txt_mod(time).chunk(2, -1)
        image_normed, image_gate = _modulate(block.img_norm1(image), image_first, layout.image_rows)
        text_normed, text_gate = _modulate(block.txt_norm1(text), text_first, layout.text_rows)
        image_attended, text_attended = self._attend(block.attn, image_normed, text_normed, layout)
        image = image + image_gate * image_attended
        text = text + text_gate * text_attended
        image_normed, image_gate = _modulate(block.img_norm2(image), image_second, layout.image_rows)
        image = image + image_gate * block.img_mlp(image_normed)
        text_normed, text_gate = _modulate(block.txt_norm2(text), text_second, layout.text_rows)
        text = text + text_gate * block.txt_mlp(text_normed)
        return image, text

    def _attend(
        self, attn: Any, image: torch.Tensor, text: torch.Tensor, layout: PackedLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of each row over its own tokens, text first."""
        heads = (-1, self._head_dim)
        q, k, v = (f(image).unflatten(-1, heads) for f in (attn.to_q, attn.to_k, attn.to_v))
        tq, tk, tv = (f(text).unflatten(-1, heads) for f in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        q, k = _rotate(attn.norm_q(q), layout.image_table), _rotate(attn.norm_k(k), layout.image_table)
        tq, tk = _rotate(attn.norm_added_q(tq), layout.text_table), _rotate(attn.norm_added_k(tk), layout.text_table)
        image_out: list[torch.Tensor] = []
        text_out: list[torch.Tensor] = []
        start = text_start = 0
        for length, text_length in zip(layout.image_lengths, layout.text_lengths, strict=True):
            image_slice, text_slice = slice(start, start + length), slice(text_start, text_start + text_length)
            joint_q, joint_k, joint_v = (
                torch.cat([t[:, text_slice], i[:, image_slice]], 1).transpose(1, 2)
                for t, i in ((tq, q), (tk, k), (tv, v))
            )
            attended = F.scaled_dot_product_attention(joint_q, joint_k, joint_v)[0].transpose(0, 1).flatten(1)
            text_out.append(attended[:text_length])
            image_out.append(attended[text_length:])
            start, text_start = start + length, text_start + text_length
        return attn.to_out[0](torch.cat(image_out))[None], attn.to_add_out(torch.cat(text_out))[None]


def _linear_in_blocks(linear: nn.Linear, blocks: RowBlocks, input: torch.Tensor) -> torch.Tensor:
    """What `linear` computes, with the same bits for a row in any batch."""
    rows = input.reshape(-1, input.shape[-1])
    missing = max(blocks.least - len(rows), -len(rows) % blocks.unit)
    padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
    results = [F.linear(block, linear.weight, linear.bias) for block in padded.split(blocks.block)]
    result = results[0] if len(results) == 1 else torch.cat(results)
    return result[: len(rows)].view(*input.shape[:-1], -1)


def _repeat(indices: Sequence[int], lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Each index as often as its length says."""
    return torch.repeat_interleave(torch.tensor(indices), torch.tensor(lengths)).to(device)


def _rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions; `table` is complex (tokens, head_dim / 2)."""
    rotated: Any = apply_rotary_emb_qwen(x, table, use_real=False)  # pyright: ignore[reportArgumentType]
    return rotated


def _modulate(x: torch.Tensor, row_values: torch.Tensor, row_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shifted and scaled tokens, and their gate; `row_of` is the row of each token in `row_values`."""
    shift, scale, gate = row_values.chunk(3, -1)
    return x * (1 + scale[row_of][None]) + shift[row_of][None], gate[row_of][None]
