# SPDX-License-Identifier: Apache-2.0
"""Ways to put several drawings through the transformer: the readable ones.

All return, per drawing, the predicted velocity with the prompt and (if it has guidance) with the negative prompt,
each (n, image tokens, channels); of the tokens of pictures that an edit comes from nothing is returned. What they take
may also be parts of drawings (shares.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

COMPUTE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError, AssertionError)
"""What torch raises for a request it cannot compute (out of memory is a RuntimeError)."""


class Pictures(Protocol):
    """What a forward has to know of a drawing, or of a part of one; see there."""

    @property
    def n(self) -> int: ...
    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]: ...
    def branches(self) -> tuple[torch.Tensor, ...]: ...
    def time(self) -> torch.Tensor: ...
    def seen(self) -> torch.Tensor: ...


class Prediction(NamedTuple):
    """What the transformer said about one drawing."""

    positive: torch.Tensor
    negative: torch.Tensor | None


class Forward(Protocol):
    """One evaluation of the transformer for many drawings."""

    def predict(self, drawings: Sequence[Pictures]) -> list[Prediction]: ...

    def forget(self) -> None:
        """Drop what is kept of the last drawings."""
        ...


class Row(NamedTuple):
    """One picture of one guidance branch of one drawing."""

    drawing: Pictures
    picture: int
    features: torch.Tensor


def rows_of(drawings: Sequence[Pictures]) -> list[Row]:
    """All rows, drawing by drawing, in each branch by branch."""
    return [Row(d, i, f) for d in drawings for f in d.branches() for i in range(d.n)]


def regroup(drawings: Sequence[Pictures], rows: Sequence[torch.Tensor]) -> list[Prediction]:
    """The inverse of `rows_of` for what came out per row."""
    found: list[Prediction] = []
    at = 0
    for drawing in drawings:
        parts: list[torch.Tensor | None] = []
        for _ in drawing.branches():
            parts.append(torch.stack([r[: prod(drawing.grids[0])] for r in rows[at : at + drawing.n]]))
            at += drawing.n
        positive, negative = (*parts, None)[:2]
        assert positive is not None
        found.append(Prediction(positive, negative))
    return found


def _no_scope(drawing: Pictures, branch: int) -> AbstractContextManager[Any]:
    return nullcontext()


class OneByOne:
    """The stock pipeline's own arithmetic, bit for bit: one call per drawing and branch, each within a `scope`."""

    def __init__(self, transformer: Any, scope: Callable[[Any, int], AbstractContextManager[Any]] = _no_scope):
        self._transformer = transformer
        self._scope = scope

    def predict(self, drawings: Sequence[Pictures]) -> list[Prediction]:
        return [self._one(d) for d in drawings]

    def forget(self) -> None:
        """Nothing is kept."""

    def _one(self, drawing: Pictures) -> Prediction:
        seen = drawing.seen()
        timestep = drawing.time().expand(len(seen)).to(seen.dtype) / 1000
        results: list[torch.Tensor] = []
        for branch, features in enumerate(drawing.branches()):
            with self._scope(drawing, branch):
                found = self._transformer(
                    hidden_states=seen,
                    timestep=timestep,
                    encoder_hidden_states=features.expand(len(seen), -1, -1),
                    encoder_hidden_states_mask=None,
                    img_shapes=[list(drawing.grids)] * len(seen),
                    return_dict=False,
                )[0]
            results.append(found[:, : prod(drawing.grids[0])])
        return Prediction(results[0], results[1] if len(results) == 2 else None)


class Padded:
    """The stock forward over drawings of equal size: text padded to the longest, branches stacked."""

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer

    def forget(self) -> None:
        """Nothing is kept."""

    def predict(self, drawings: Sequence[Pictures]) -> list[Prediction]:
        found: dict[int, Prediction] = {}
        by_size = sorted(drawings, key=lambda d: d.grids)
        for _, group in groupby(by_size, key=lambda d: d.grids):
            alike = list(group)
            for drawing, prediction in zip(alike, regroup(alike, self._group(alike)), strict=True):
                found[id(drawing)] = prediction
        return [found[id(d)] for d in drawings]

    def _group(self, drawings: list[Pictures]) -> Sequence[torch.Tensor]:
        rows = rows_of(drawings)
        lengths = [r.features.shape[1] for r in rows]
        longest = max(lengths)
        features = torch.cat([F.pad(r.features, (0, 0, 0, longest - r.features.shape[1])) for r in rows])
        mask = None
        if min(lengths) < longest:
            positions = torch.arange(longest, device=features.device)
            mask = positions[None] < torch.tensor(lengths, device=features.device)[:, None]
        latents = torch.stack([r.drawing.seen()[r.picture] for r in rows])
        timesteps = torch.stack([r.drawing.time() for r in rows]).to(latents.dtype) / 1000
        return self._transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=features,
            encoder_hidden_states_mask=mask,
            img_shapes=[list(drawings[0].grids)] * len(rows),
            return_dict=False,
        )[0]
