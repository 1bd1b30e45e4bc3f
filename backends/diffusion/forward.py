# SPDX-License-Identifier: Apache-2.0
"""Interface between the engine and the transformer: what a forward takes and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch

COMPUTE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError, AssertionError)
"""What torch raises for a request that it cannot compute (out of memory is a RuntimeError)."""


class ForwardInput(Protocol):
    """What a forward reads of an ImageRun, or of a part of one (parallel/partition.py)."""

    @property
    def n(self) -> int:
        """Number of images."""
        ...

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]:
        """(frames, rows, columns) in tokens: of the generated image, then of each source image."""
        ...

    def branches(self) -> tuple[torch.Tensor, ...]:
        """Text features of each guidance branch, (1, tokens, dim)."""
        ...

    def timestep(self) -> torch.Tensor:
        """Scalar from 1000 down to 0."""
        ...

    def model_input(self) -> torch.Tensor:
        """Latents of the images and of their source images, (n, tokens, channels)."""
        ...


class Prediction(NamedTuple):
    """Predicted velocity of one run with the prompt and, under guidance, with the negative prompt.

    Both are (n, image tokens, channels); tokens of source images are left out.
    """

    positive: torch.Tensor
    negative: torch.Tensor | None

    @classmethod
    def of_branches(cls, branches: Sequence[torch.Tensor]) -> Prediction:
        return cls(branches[0], branches[1] if len(branches) == 2 else None)


class Forward(Protocol):
    """One evaluation of the transformer for a batch of runs."""

    def predict(self, inputs: Sequence[ForwardInput]) -> list[Prediction]: ...

    def forget(self) -> None:
        """Drop cached state of the last batch."""
        ...


class BatchRow(NamedTuple):
    """One image of one guidance branch of one input."""

    source: ForwardInput
    image: int
    features: torch.Tensor


def rows_of(inputs: Sequence[ForwardInput]) -> list[BatchRow]:
    """All rows: input by input, branch by branch, image by image."""
    return [BatchRow(i, image, features) for i in inputs for features in i.branches() for image in range(i.n)]


def regroup(inputs: Sequence[ForwardInput], rows: Sequence[torch.Tensor]) -> list[Prediction]:
    """The inverse of `rows_of` for one result per row."""
    predictions: list[Prediction] = []
    remaining = iter(rows)
    for one in inputs:
        image_tokens = prod(one.grids[0])
        branches = [torch.stack([next(remaining)[:image_tokens] for _ in range(one.n)]) for _ in one.branches()]
        predictions.append(Prediction.of_branches(branches))
    return predictions
