# SPDX-License-Identifier: Apache-2.0
"""Which rank computes what of a step, and the messages between ranks.

A rank's share is described once, while the same runs step together, and sent as one flat tensor per step. The timestep
travels in the dtype of the latents, to which every forward converts it first: nothing is rounded twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import torch

from triton_omni.backends.core.errors import MAX_MESSAGE_CHARS
from triton_omni.backends.diffusion.forward import ForwardInput, Prediction


@dataclass(eq=False, frozen=True, slots=True)
class ForwardPart:
    """Images `first` to `first + n` of one guidance branch of one input."""

    source: ForwardInput
    branch: int
    first: int
    n: int

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]:
        return self.source.grids

    @property
    def tokens(self) -> int:
        """Image and text tokens of all its images."""
        return self.n * (sum(prod(grid) for grid in self.grids) + self.branches()[0].shape[1])

    def branches(self) -> tuple[torch.Tensor, ...]:
        return (self.source.branches()[self.branch],)

    def timestep(self) -> torch.Tensor:
        return self.source.timestep()

    def model_input(self) -> torch.Tensor:
        return self.source.model_input()[self.first : self.first + self.n]


def parts_of(inputs: Iterable[ForwardInput], by_image: bool) -> list[ForwardPart]:
    """All parts of a step, in order: branch by branch, or image by image of each branch."""
    return [
        ForwardPart(source, branch, first, 1 if by_image else source.n)
        for source in inputs
        for branch in range(len(source.branches()))
        for first in range(0, source.n, 1 if by_image else source.n)
    ]


def partition(tokens: Sequence[int], ranks: int) -> list[int]:
    """The rank of each part, with about equal tokens per rank: the largest part first, to the least loaded rank."""
    load = [0] * ranks
    rank_of = [0] * len(tokens)
    for part in sorted(range(len(tokens)), key=lambda p: -tokens[p]):
        rank_of[part] = load.index(min(load))
        load[rank_of[part]] += tokens[part]
    return rank_of


def gather(results: Sequence[tuple[ForwardPart, torch.Tensor]], inputs: Sequence[ForwardInput]) -> list[Prediction]:
    """Predictions of the inputs from the results of their parts, (n, image tokens, channels) each, in any order."""
    branches: dict[tuple[ForwardInput, int], list[tuple[int, torch.Tensor]]] = {}
    for part, result in results:
        branches.setdefault((part.source, part.branch), []).append((part.first, result))
    whole = {
        key: torch.cat([result for _, result in sorted(pieces, key=lambda piece: piece[0])])
        for key, pieces in branches.items()
    }
    return [Prediction(whole[source, 0], whole.get((source, 1))) for source in inputs]


# --- messages ----------------------------------------------------------------------------------------------------
class PartShape(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of a part: images, grids, text tokens, width of the text features, and channels of the latents."""

    n: int
    grids: tuple[tuple[int, int, int], ...]
    text_tokens: int
    text_width: int
    channels: int

    @classmethod
    def of(cls, part: ForwardPart) -> PartShape:
        _, text_tokens, text_width = part.branches()[0].shape
        return cls(part.n, part.grids, text_tokens, text_width, part.model_input().shape[2])


class ForwardRequest(msgspec.Struct, frozen=True, array_like=True):
    """To a rank: a tensor of `numel` values follows. `parts` is None if they are those of the last request."""

    numel: int
    parts: tuple[PartShape, ...] | None = None


class ForwardReply(msgspec.Struct, frozen=True, array_like=True):
    """From a rank: an error, or the number of channels of its results, which follow as a tensor unless `context` ranks
    gather them. Also sent after load."""

    error: str = ""
    channels: int = 0


def error_text(error: Exception) -> str:
    """Text of a failed forward; equal on every rank for the same failure."""
    return str(error)[:MAX_MESSAGE_CHARS] or type(error).__name__


def pack(parts: Sequence[ForwardPart], with_text: bool, dtype: torch.dtype) -> torch.Tensor:
    """All values of these parts in one flat tensor: latents and timestep of each, then the text features of each."""
    pieces = [piece for part in parts for piece in (part.model_input().reshape(-1), part.timestep().reshape(1))]
    if with_text:
        pieces += [part.branches()[0].reshape(-1) for part in parts]
    return torch.cat([piece.to(dtype) for piece in pieces])


@dataclass(eq=False, slots=True)
class RemotePart:
    """A ForwardPart on the rank that computes it. Each step sets latents and time; `text` is set once."""

    shape: PartShape
    text: torch.Tensor | None = None
    latents: torch.Tensor | None = None
    time: torch.Tensor | None = None

    @property
    def n(self) -> int:
        return self.shape.n

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]:
        return self.shape.grids

    def branches(self) -> tuple[torch.Tensor, ...]:
        assert self.text is not None
        return (self.text,)

    def timestep(self) -> torch.Tensor:
        assert self.time is not None
        return self.time

    def model_input(self) -> torch.Tensor:
        assert self.latents is not None
        return self.latents


def unpack(flat: torch.Tensor, parts: Sequence[RemotePart], with_text: bool) -> None:
    """The inverse of `pack`, into `parts`. Raises ValueError if the sizes do not match."""
    shapes: list[tuple[int, ...]] = []
    for part in parts:
        shapes += [(part.n, sum(prod(grid) for grid in part.grids), part.shape.channels), (1,)]
    if with_text:
        shapes += [(1, part.shape.text_tokens, part.shape.text_width) for part in parts]
    sizes = [prod(shape) for shape in shapes]
    if sum(sizes) != len(flat):
        raise ValueError(f"{len(flat)} values received instead of {sum(sizes)}")
    tensors = [piece.view(shape) for piece, shape in zip(flat.split(sizes), shapes, strict=True)]
    for index, part in enumerate(parts):
        part.latents, part.time = tensors[2 * index], tensors[2 * index + 1][0]
        if with_text:
            part.text = tensors[2 * len(parts) + index]
