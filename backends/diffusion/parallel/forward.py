# SPDX-License-Identifier: Apache-2.0
"""A forward computed by all ranks of an instance (ranks.py), in one of two ways.

    cfg      every rank computes some parts of the step, and the results are gathered
    context  every rank gets all parts, and diffusers splits each image's tokens inside the transformer (context.py)

A step that breaks off while ranks wait for one another leaves them out of step, so it ends the worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from math import prod

import torch

from triton_omni.backends.core.errors import StageFailed
from triton_omni.backends.diffusion.forward import COMPUTE_ERRORS, Forward, ForwardInput, Prediction
from triton_omni.backends.diffusion.options import DiffusionOptions
from triton_omni.backends.diffusion.parallel.partition import (
    ForwardPart,
    ForwardRequest,
    PartShape,
    error_text,
    gather,
    pack,
    partition,
    parts_of,
)
from triton_omni.backends.diffusion.parallel.ranks import RankGroup

log = logging.getLogger("triton_omni.diffusion")

Results = list[tuple[ForwardPart, torch.Tensor]]


class ParallelForward:
    """A forward whose parts are computed by all ranks."""

    def __init__(self, own: Forward, ranks: RankGroup, options: DiffusionOptions) -> None:
        self._own, self._ranks = own, ranks
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._answer_s = options.parallel.answer_s
        self._gathers = options.parallel.context == 1
        self._by_image = options.batching != "seq"  # the stock arithmetic computes all images of a branch in one call
        self._known: list[tuple[ForwardInput, torch.Size]] = []
        """Inputs whose text features the other ranks have, and the shapes of their latents."""
        self._shares: list[list[ForwardPart]] = []
        """Parts by rank."""

    def predict(self, inputs: Sequence[ForwardInput]) -> list[Prediction]:
        known = [(source, source.model_input().shape) for source in inputs]
        are_new = known != self._known  # inputs compare by identity
        if are_new:
            self._known, self._shares = known, self._partition(inputs)
        others = {rank: share for rank, share in enumerate(self._shares) if rank and share}
        requests = {rank: self._request(share, are_new) for rank, share in others.items()}  # an error here is local
        try:
            results, errors = self._exchange(others, requests)
        except COMPUTE_ERRORS as error:  # a rank still waits for data, or has some for us
            raise StageFailed(f"a step broke off between the ranks: {error}") from error
        if not self._gathers and errors and (len(errors) <= len(others) or len(set(errors)) > 1):
            raise StageFailed(f"a forward failed on some ranks only: {errors[0]}")
        if errors:
            raise RuntimeError(errors[0])
        return gather(results, inputs)

    def forget(self) -> None:
        """Drop cached state; the other ranks keep theirs until the next request."""
        self._known, self._shares = [], []
        self._own.forget()

    def _partition(self, inputs: Sequence[ForwardInput]) -> list[list[ForwardPart]]:
        parts = parts_of(inputs, self._by_image)
        if not self._gathers:
            return [parts] * self._ranks.count
        rank_of = partition([part.tokens for part in parts], self._ranks.count)
        return [[p for p, of in zip(parts, rank_of, strict=True) if of == rank] for rank in range(self._ranks.count)]

    def _request(self, share: Sequence[ForwardPart], are_new: bool) -> tuple[ForwardRequest, torch.Tensor]:
        """The message to a rank, and the tensor that follows it."""
        values = pack(share, are_new, self._dtype)
        return ForwardRequest(len(values), tuple(PartShape.of(p) for p in share) if are_new else None), values

    def _exchange(
        self, others: Mapping[int, Sequence[ForwardPart]], requests: Mapping[int, tuple[ForwardRequest, torch.Tensor]]
    ) -> tuple[Results, list[str]]:
        """Send requests, compute the own share and receive all replies; results, and the errors of all ranks."""
        deadline_s = time.monotonic() + self._answer_s
        sends = {rank: self._ranks.request(rank, request, values) for rank, (request, values) in requests.items()}
        results, errors = self._own_results()
        for rank, share in others.items():
            reply = self._ranks.reply(rank, deadline_s)
            if reply.error:
                errors.append(reply.error)
            elif self._gathers:
                results += zip(share, self._receive(rank, share, reply.channels), strict=True)
        for rank, send in sends.items():
            self._ranks.finish_send(rank, send)
        return results, errors

    def _own_results(self) -> tuple[Results, list[str]]:
        """Results or the error of this rank's share; an error is raised only after all replies were received."""
        share = self._shares[0]
        try:
            predictions = self._own.predict(share) if share else []
        except COMPUTE_ERRORS as error:
            log.warning("rank 0: a forward failed: %s", error)
            return [], [error_text(error)]
        return [(part, prediction.positive) for part, prediction in zip(share, predictions, strict=True)], []

    def _receive(self, rank: int, share: Sequence[ForwardPart], channels: int) -> list[torch.Tensor]:
        """Results of a rank, (n, image tokens, channels) each."""
        shapes = [(part.n, prod(part.grids[0]), channels) for part in share]
        sizes = [prod(shape) for shape in shapes]
        values = share[0].model_input().new_empty(sum(sizes), dtype=self._dtype)
        self._ranks.receive(rank, values)
        return [piece.view(shape) for piece, shape in zip(values.split(sizes), shapes, strict=True)]
