# SPDX-License-Identifier: Apache-2.0
"""Any mix of drawings in one forward: no padding, no masks, no common size.

All image tokens form one sequence and all text tokens another. Everything that works token by token (projections,
norms, feed-forward) runs once over these; attention runs per row, over the row's own text and image tokens; what
depends on a row's timestep (the modulation) is computed per row and spread to its tokens. Some models see the pictures
to edit at time zero (`zero_cond_t`): then there is a second such row for each.

Batch invariance. On a CPU a matrix product of few rows takes another kernel than one of many, with other rounding:
that is the only place where a row's bits could depend on its neighbours. So every product here has at least
`min_rows` rows, with unused ones if need be, and a row's result is the same, bit for bit, whoever else is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from triton_omni.backends.diffusion.forward import Pictures, Prediction, Row, regroup, rows_of
from triton_omni.backends.diffusion.upstream import apply_rotary_emb_qwen

MIN_ROWS_PER_THREAD = 8  # a thread that gets fewer than 4 rows of a product takes another kernel; measured, doubled
MIN_ROWS = 16

PARTS = ("img_in", "txt_in", "txt_norm", "time_text_embed", "pos_embed", "transformer_blocks", "norm_out", "proj_out")
BLOCK_PARTS = (
    "img_mod", "img_norm1", "img_norm2", "img_mlp", "txt_mod", "txt_norm1", "txt_norm2", "txt_mlp", "attn",
)  # fmt: skip
ATTENTION_PARTS = (
    "to_q", "to_k", "to_v", "to_out", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    "norm_q", "norm_k", "norm_added_q", "norm_added_k",
)  # fmt: skip


def lacks(transformer: Any) -> str:
    """What keeps this transformer from being packed, in words; empty if nothing does."""
    config = transformer.config
    if config.get("guidance_embeds") or config.get("use_additional_t_cond"):
        return "it is conditioned on more than text and time"
    missing = [p for p in PARTS if not hasattr(transformer, p)]
    if not missing:
        block = transformer.transformer_blocks[0]
        missing = [p for p in BLOCK_PARTS if not hasattr(block, p)]
        missing = missing or [p for p in ATTENTION_PARTS if getattr(block.attn, p, None) is None]
    return f"it has no {', '.join(missing)}" if missing else ""


@dataclass(eq=False)
class Layout:
    """What stays the same while the same drawings step together.

    image, text   the row of modulation of each token, padding (row 0) at the end
    tables        rotary tables of all image tokens and of all text tokens
    prompt        projected text features (1, text tokens, dim)
    """

    drawings: tuple[Pictures, ...]
    rows: list[Row]
    image_lengths: list[int]
    text_lengths: list[int]
    image: torch.Tensor
    text: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor]
    prompt: torch.Tensor

    def is_for(self, drawings: Sequence[Pictures]) -> bool:
        """True if these are the very same drawings in the same order."""
        return len(drawings) == len(self.drawings) and all(a is b for a, b in zip(drawings, self.drawings, strict=True))


class Packed:
    """The transformer's own modules, applied to packed sequences."""

    def __init__(self, transformer: Any, threads: int) -> None:
        self._model = transformer
        self._min_rows = max(MIN_ROWS, MIN_ROWS_PER_THREAD * threads)
        self._head_dim: int = transformer.config.attention_head_dim
        self._sources_at_zero = bool(transformer.config.get("zero_cond_t"))
        self._layout: Layout | None = None

    def predict(self, drawings: Sequence[Pictures]) -> list[Prediction]:
        if self._layout is None or not self._layout.is_for(drawings):
            self._layout = self._lay_out(drawings)
        rows = self._forward(self._layout)
        return regroup(drawings, rows)

    def forget(self) -> None:
        """Drop what is kept of the last drawings."""
        self._layout = None

    # --- layout --------------------------------------------------------------------------------------------------
    def _lay_out(self, drawings: Sequence[Pictures]) -> Layout:
        model = self._model
        rows = rows_of(drawings)
        lengths = [[prod(grid) for grid in r.drawing.grids] for r in rows]  # of the picture, then of its sources
        text_lengths = [r.features.shape[1] for r in rows]
        device = rows[0].features.device
        tables = [
            model.pos_embed([list(r.drawing.grids)], max_txt_seq_len=length, device=device)
            for r, length in zip(rows, text_lengths, strict=True)
        ]
        features = torch.cat([r.features[0] for r in rows])
        return Layout(
            tuple(drawings),
            rows,
            [sum(each) for each in lengths],
            text_lengths,
            self._spread(
                [place for i in range(len(rows)) for place in (i, i + len(rows) * self._sources_at_zero)],
                [tokens for picture, *sources in lengths for tokens in (picture, sum(sources))],
                device,
            ),
            self._spread(range(len(rows)), text_lengths, device),
            (self._fill(torch.cat([t for t, _ in tables])), self._fill(torch.cat([t for _, t in tables]))),
            model.txt_in(model.txt_norm(self._fill(features)))[None],
        )

    def _spread(self, places: Sequence[int], lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        """Each place as often as its length says."""
        return self._fill(torch.repeat_interleave(torch.tensor(places), torch.tensor(lengths))).to(device)

    def _fill(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with zeros appended until it has enough rows."""
        lacking = self._min_rows - x.shape[0]
        return x if lacking <= 0 else torch.cat([x, x.new_zeros(lacking, *x.shape[1:])])

    # --- forward -------------------------------------------------------------------------------------------------
    def _forward(self, layout: Layout) -> Sequence[torch.Tensor]:
        """Velocities, one (image tokens, channels) per row."""
        model = self._model
        latents = torch.cat([r.drawing.seen()[r.picture] for r in layout.rows])
        times = torch.stack([r.drawing.time() for r in layout.rows]).to(latents.dtype) / 1000
        if self._sources_at_zero:
            times = torch.cat([times, times * 0])
        image = model.img_in(self._fill(latents))[None]
        time = model.time_text_embed(self._fill(times), image)
        text = layout.prompt
        for block in model.transformer_blocks:
            image, text = self._block(block, image, text, time, layout)
        scale, shift = model.norm_out.linear(model.norm_out.silu(time).to(image.dtype)).chunk(2, dim=1)
        image = model.norm_out.norm(image) * (1 + scale[layout.image][None]) + shift[layout.image][None]
        total = sum(layout.image_lengths)
        return model.proj_out(image)[0, :total].split(layout.image_lengths)

    def _block(
        self, block: Any, image: torch.Tensor, text: torch.Tensor, time: torch.Tensor, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One dual-stream block."""
        image_first, image_second = block.img_mod(time).chunk(2, -1)
        text_first, text_second = block.txt_mod(time).chunk(2, -1)
        image_normed, image_gate = _modulate(block.img_norm1(image), image_first, layout.image)
        text_normed, text_gate = _modulate(block.txt_norm1(text), text_first, layout.text)
        image_seen, text_seen = self._attend(block.attn, image_normed, text_normed, layout)
        image = image + image_gate * image_seen
        text = text + text_gate * text_seen
        image_normed, image_gate = _modulate(block.img_norm2(image), image_second, layout.image)
        image = image + image_gate * block.img_mlp(image_normed)
        text_normed, text_gate = _modulate(block.txt_norm2(text), text_second, layout.text)
        text = text + text_gate * block.txt_mlp(text_normed)
        return image, text

    def _attend(
        self, attn: Any, image: torch.Tensor, text: torch.Tensor, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's tokens attend to that row's text and image tokens; text comes first."""
        image_table, text_table = layout.tables
        heads = (-1, self._head_dim)
        q, k, v = (f(image).unflatten(-1, heads) for f in (attn.to_q, attn.to_k, attn.to_v))
        tq, tk, tv = (f(text).unflatten(-1, heads) for f in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        q, k = _rotate(attn.norm_q(q), image_table), _rotate(attn.norm_k(k), image_table)
        tq, tk = _rotate(attn.norm_added_q(tq), text_table), _rotate(attn.norm_added_k(tk), text_table)
        seen_by_image: list[torch.Tensor] = []
        seen_by_text: list[torch.Tensor] = []
        at = text_at = 0
        for length, text_length in zip(layout.image_lengths, layout.text_lengths, strict=True):
            mine, text_mine = slice(at, at + length), slice(text_at, text_at + text_length)
            jq, jk, jv = (
                torch.cat([t[:, text_mine], i[:, mine]], 1).transpose(1, 2) for t, i in ((tq, q), (tk, k), (tv, v))
            )
            seen = F.scaled_dot_product_attention(jq, jk, jv)[0].transpose(0, 1).flatten(1)
            seen_by_text.append(seen[:text_length])
            seen_by_image.append(seen[text_length:])
            at, text_at = at + length, text_at + text_length
        image_out = attn.to_out[0](self._fill(torch.cat(seen_by_image)))[None]
        return image_out, attn.to_add_out(self._fill(torch.cat(seen_by_text)))[None]


def _rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotary positions; `table` is complex (tokens, head_dim / 2)."""
    rotated: Any = apply_rotary_emb_qwen(x, table, use_real=False)  # pyright: ignore[reportArgumentType]
    return rotated


def _modulate(x: torch.Tensor, row_values: torch.Tensor, row_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shifted and scaled tokens, and their gate; the values are per row, `row_of` names each token's row."""
    shift, scale, gate = row_values.chunk(3, -1)
    return x * (1 + scale[row_of][None]) + shift[row_of][None], gate[row_of][None]
