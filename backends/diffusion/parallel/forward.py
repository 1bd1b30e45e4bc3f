# SPDX-License-Identifier: Apache-2.0
"""A forward computed by all ranks of an instance (ranks.py), in one of two manners.

    cfg      every rank gets some parts of the step, and the results are gathered
    context  every rank gets all of it, and diffusers splits each picture's tokens inside the transformer (context.py)

A step that breaks off while somebody waits for somebody leaves the ranks out of step, so it ends the worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from math import prod

import torch

from triton_omni.backends.core.errors import StageFailed
from triton_omni.backends.diffusion.forward import COMPUTE_ERRORS, Forward, Pictures, Prediction
from triton_omni.backends.diffusion.options import DiffusionOptions
from triton_omni.backends.diffusion.parallel.partition import Ask, Outline, Part, deal, pack, parts_of, reason, together
from triton_omni.backends.diffusion.parallel.ranks import Ranks

log = logging.getLogger("triton_omni.diffusion")


class Spread:
    """A forward whose parts are computed by all ranks."""

    def __init__(self, own: Forward, ranks: Ranks, options: DiffusionOptions) -> None:
        self._own, self._ranks = own, ranks
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._answer_s = options.parallel.answer_s
        self._gathers = options.parallel.context == 1
        self._by_picture = options.batching != "seq"  # the stock arithmetic of a branch is one call for its pictures
        self._known: list[tuple[int, torch.Size]] = []
        """The drawings that the followers have the texts of, and their sizes."""
        self._shares: list[list[Part]] = []
        """By rank; they keep the drawings."""

    def predict(self, drawings: Sequence[Pictures]) -> list[Prediction]:
        known = [(id(drawing), drawing.seen().shape) for drawing in drawings]
        are_new = known != self._known
        if are_new:
            self._known, self._shares = known, self._dealt(drawings)
        others = {rank: share for rank, share in enumerate(self._shares) if rank and share}
        asks = {rank: self._ask(share, are_new) for rank, share in others.items()}  # what fails here fails alone
        try:
            found, errors = self._exchange(others, asks)
        except COMPUTE_ERRORS as error:  # somebody still waits for words or numbers, or has some for us
            raise StageFailed(f"a step broke off between the ranks: {error}") from error
        if not self._gathers and errors and (len(errors) <= len(others) or len(set(errors)) > 1):
            raise StageFailed(f"a forward went well on some ranks only: {errors[0]}")
        if errors:
            raise RuntimeError(errors[0])
        return together(found, drawings)

    def forget(self) -> None:
        """Drop what is kept of the last drawings; a follower keeps its copies until it is asked again."""
        self._known, self._shares = [], []
        self._own.forget()

    def _dealt(self, drawings: Sequence[Pictures]) -> list[list[Part]]:
        parts = parts_of(drawings, self._by_picture)
        if not self._gathers:
            return [parts] * self._ranks.count
        ranks = deal([part.tokens for part in parts], self._ranks.count)
        return [[p for p, of in zip(parts, ranks, strict=True) if of == rank] for rank in range(self._ranks.count)]

    def _ask(self, share: Sequence[Part], are_new: bool) -> tuple[Ask, torch.Tensor]:
        """What a follower is to be told, and the numbers that go with it."""
        numbers = pack(share, are_new, self._dtype)
        return Ask(len(numbers), tuple(Outline.of(part) for part in share) if are_new else None), numbers

    def _exchange(
        self, others: Mapping[int, Sequence[Part]], asks: Mapping[int, tuple[Ask, torch.Tensor]]
    ) -> tuple[list[tuple[Part, torch.Tensor]], list[str]]:
        """Ask, compute, hear everybody and take what they have; the results, and what went wrong on which rank."""
        deadline_s = time.monotonic() + self._answer_s
        sent = {rank: self._ranks.ask(rank, ask, numbers) for rank, (ask, numbers) in asks.items()}
        found, errors = self._own_part()
        for rank, share in others.items():
            answer = self._ranks.answer(rank, deadline_s)
            errors += [answer.error] if answer.error else []
            if self._gathers and not answer.error:
                found += zip(share, self._take(rank, share, answer.channels), strict=True)
        for rank, work in sent.items():
            self._ranks.sent(rank, work)
        return found, errors

    def _own_part(self) -> tuple[list[tuple[Part, torch.Tensor]], list[str]]:
        """Our own share, and what is wrong with it: the others have to be heard before anything is raised."""
        share = self._shares[0]
        try:
            found = self._own.predict(share) if share else []
        except COMPUTE_ERRORS as error:
            log.warning("rank 0: a forward failed: %s", error)
            return [], [reason(error)]
        return [(part, one.positive) for part, one in zip(share, found, strict=True)], []

    def _take(self, rank: int, share: Sequence[Part], channels: int) -> list[torch.Tensor]:
        """A follower's results, (n, image tokens, channels) each."""
        shapes = [(part.n, prod(part.grids[0]), channels) for part in share]
        numbers = share[0].seen().new_empty(sum(prod(shape) for shape in shapes), dtype=self._dtype)
        self._ranks.take(rank, numbers)
        pieces = numbers.split([prod(shape) for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
