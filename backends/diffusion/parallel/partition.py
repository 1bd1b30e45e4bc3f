# SPDX-License-Identifier: Apache-2.0
"""What each rank of an instance computes of a step, and how it gets there: parts of drawings, dealt and sent.

A share travels as a description (once, while the same drawings step together) and one flat tensor per step. Its time
is sent in the dtype of the latents, which is what every forward makes of it first: nothing is rounded twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import torch

from triton_omni.backends.core.errors import MAX_MESSAGE_CHARS
from triton_omni.backends.diffusion.forward import Pictures, Prediction


@dataclass(eq=False, frozen=True, slots=True)
class Part:
    """Pictures `first` to `first + n` of one guidance branch of a drawing."""

    drawing: Pictures
    branch: int
    first: int
    n: int

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]:
        return self.drawing.grids

    @property
    def tokens(self) -> int:
        """Image and text tokens of all its pictures."""
        return self.n * (sum(prod(grid) for grid in self.grids) + self.branches()[0].shape[1])

    def branches(self) -> tuple[torch.Tensor, ...]:
        return (self.drawing.branches()[self.branch],)

    def time(self) -> torch.Tensor:
        return self.drawing.time()

    def seen(self) -> torch.Tensor:
        return self.drawing.seen()[self.first : self.first + self.n]


def parts_of(drawings: Iterable[Pictures], by_picture: bool) -> list[Part]:
    """All there is to compute, in order: branch by branch, or picture by picture of each branch."""
    return [
        Part(drawing, branch, first, 1 if by_picture else drawing.n)
        for drawing in drawings
        for branch in range(len(drawing.branches()))
        for first in range(0, drawing.n, 1 if by_picture else drawing.n)
    ]


def deal(tokens: Sequence[int], ranks: int) -> list[int]:
    """The rank of each part, so that all have about as many tokens: the largest first, to whoever has least."""
    held = [0] * ranks
    rank_of = [0] * len(tokens)
    for part in sorted(range(len(tokens)), key=lambda p: -tokens[p]):
        rank_of[part] = held.index(min(held))
        held[rank_of[part]] += tokens[part]
    return rank_of


def together(found: Sequence[tuple[Part, torch.Tensor]], drawings: Sequence[Pictures]) -> list[Prediction]:
    """The drawings' predictions out of those of their parts, (n, image tokens, channels) each, in any order."""
    branches: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
    for part, one in found:
        branches.setdefault((id(part.drawing), part.branch), []).append((part.first, one))
    whole = {key: torch.cat([one for _, one in sorted(some, key=lambda s: s[0])]) for key, some in branches.items()}
    return [Prediction(whole[id(d), 0], whole.get((id(d), 1))) for d in drawings]


# --- on the way ---------------------------------------------------------------------------------------------------
class Outline(msgspec.Struct, frozen=True, array_like=True):
    """The sizes of a part: pictures, grids, text tokens and their width, and channels of the latents."""

    n: int
    grids: tuple[tuple[int, int, int], ...]
    text: int
    text_width: int
    channels: int

    @classmethod
    def of(cls, part: Part) -> Outline:
        _, text, text_width = part.branches()[0].shape
        return cls(part.n, part.grids, text, text_width, part.seen().shape[2])

    @property
    def result_tokens(self) -> int:
        return self.n * prod(self.grids[0])


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """To a follower: a tensor of `numel` numbers follows. `parts` are None if they are those of the last time."""

    numel: int
    parts: tuple[Outline, ...] | None = None


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """From a follower: it failed for this reason, or a tensor with so many channels follows, if one is due."""

    error: str = ""
    channels: int = 0


def reason(error: Exception) -> str:
    """Why a forward failed, in the same words on every rank."""
    return str(error)[:MAX_MESSAGE_CHARS] or type(error).__name__


def pack(parts: Sequence[Part], with_text: bool, dtype: torch.dtype) -> torch.Tensor:
    """All numbers of these parts, flat: latents and time of each, then the texts of each, if wanted."""
    pieces = [piece for part in parts for piece in (part.seen().reshape(-1), part.time().reshape(1))]
    if with_text:
        pieces += [part.branches()[0].reshape(-1) for part in parts]
    return torch.cat([piece.to(dtype) for piece in pieces])


@dataclass(eq=False, slots=True)
class Copy:
    """A part where it is computed. Set by each step: latents and moment; `text` when it first came."""

    outline: Outline
    text: torch.Tensor | None = None
    latents: torch.Tensor | None = None
    moment: torch.Tensor | None = None

    @property
    def n(self) -> int:
        return self.outline.n

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]:
        return self.outline.grids

    def branches(self) -> tuple[torch.Tensor, ...]:
        assert self.text is not None
        return (self.text,)

    def time(self) -> torch.Tensor:
        assert self.moment is not None
        return self.moment

    def seen(self) -> torch.Tensor:
        assert self.latents is not None
        return self.latents


def unpack(flat: torch.Tensor, copies: Sequence[Copy], with_text: bool) -> None:
    """The inverse of `pack`, into `copies`. Raises ValueError if these are not their sizes."""
    at = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        at += prod(shape)
        return flat[at - prod(shape) : at].view(shape)

    for copy in copies:
        outline = copy.outline
        copy.latents = take(outline.n, sum(prod(grid) for grid in outline.grids), outline.channels)
        copy.moment = take(1)[0]
    if with_text:
        for copy in copies:
            copy.text = take(1, copy.outline.text, copy.outline.text_width)
    if at != len(flat):
        raise ValueError(f"{len(flat)} numbers came instead of {at}")
