# SPDX-License-Identifier: Apache-2.0
"""The forwards behind the option `batching`: sequential and padded calls of the stock transformer, or packed.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from math import prod

import torch
import torch.nn.functional as F

from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.diffusion.forward import Forward, ForwardInput, Prediction, regroup, rows_of
from triton_omni.backends.diffusion.options import DiffusionOptions
from triton_omni.backends.diffusion.packed import PackedForward, unsupported_reason
from triton_omni.backends.diffusion.upstream import ModelMixin


def make_forward(transformer: ModelMixin, options: DiffusionOptions) -> Forward:
    """The forward that `options.batching` names. Raises OptionsError if this transformer cannot be packed."""
    if options.batching == "seq":
        return SequentialForward(transformer)
    if options.batching == "pad":
        return PaddedForward(transformer)
    reason = unsupported_reason(transformer)
    if reason:
        raise OptionsError(
            f"model '{options.model}' does not support `batching: packed`: {reason}; set `batching: pad` or `seq`"
        )
    return PackedForward(transformer, options.threads)


def _no_context(source: ForwardInput, branch: int) -> AbstractContextManager[object]:
    return nullcontext()


class SequentialForward:
    """One call per input and branch: bit for bit the arithmetic of diffusers' pipeline.

    `call_context(input, branch)` is entered around each call.
    """

    def __init__(
        self,
        transformer: ModelMixin,
        call_context: Callable[[ForwardInput, int], AbstractContextManager[object]] = _no_context,
    ) -> None:
        self._transformer = transformer
        self._call_context = call_context

    def predict(self, inputs: Sequence[ForwardInput]) -> list[Prediction]:
        return [self._one(source) for source in inputs]

    def forget(self) -> None:
        """No state is cached."""

    def _one(self, source: ForwardInput) -> Prediction:
        latents = source.model_input()
        timestep = source.timestep().expand(len(latents)).to(latents.dtype) / 1000
        results: list[torch.Tensor] = []
        for branch, features in enumerate(source.branches()):
            with self._call_context(source, branch):
                velocity = self._transformer(
                    hidden_states=latents,
                    timestep=timestep,
                    encoder_hidden_states=features.expand(len(latents), -1, -1),
                    encoder_hidden_states_mask=None,
                    img_shapes=[list(source.grids)] * len(latents),
                    return_dict=False,
                )[0]
            results.append(velocity[:, : prod(source.grids[0])])
        return Prediction.of_branches(results)


class PaddedForward:
    """One stock call per group of equal size: text padded to the longest, branches stacked."""

    def __init__(self, transformer: ModelMixin) -> None:
        self._transformer = transformer

    def forget(self) -> None:
        """No state is cached."""

    def predict(self, inputs: Sequence[ForwardInput]) -> list[Prediction]:
        predictions: dict[int, Prediction] = {}
        by_size = sorted(range(len(inputs)), key=lambda i: inputs[i].grids)
        for _, indices in groupby(by_size, key=lambda i: inputs[i].grids):
            group = list(indices)
            members = [inputs[i] for i in group]
            predictions |= zip(group, regroup(members, self._call(members)), strict=True)
        return [predictions[i] for i in range(len(inputs))]

    def _call(self, inputs: list[ForwardInput]) -> Sequence[torch.Tensor]:
        rows = rows_of(inputs)
        lengths = [row.features.shape[1] for row in rows]
        longest = max(lengths)
        features = torch.cat([F.pad(row.features, (0, 0, 0, longest - row.features.shape[1])) for row in rows])
        mask = None
        if min(lengths) < longest:
            positions = torch.arange(longest, device=features.device)
            mask = positions[None] < torch.tensor(lengths, device=features.device)[:, None]
        latents = torch.stack([row.source.model_input()[row.image] for row in rows])
        timesteps = torch.stack([row.source.timestep() for row in rows]).to(latents.dtype) / 1000
        return self._transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=features,
            encoder_hidden_states_mask=mask,
            img_shapes=[list(inputs[0].grids)] * len(rows),
            return_dict=False,
        )[0]
