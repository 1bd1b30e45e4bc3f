# SPDX-License-Identifier: Apache-2.0
"""Sampling settings of the request, the deploy file and the model → arguments of vLLM's SamplingParams.

Precedence, strongest first: the request's options for this stage (`stages.<stage>`), its `sampling`, the deploy
file's `sampling`, the checkpoint's generation_config.json, vLLM's neutral values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from triton_omni.backends.ar.options import SamplingDefaults
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import Sampling, stage_options

DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed")
MAX_STOPS = 16  # every stop string is searched in every step
MAX_STOP_CHARS = 256  # text of the longest stop string's length is held back from the stream
SEEDS = range(-(2**63), 2**63)  # what a torch generator takes


def merge(*layers: Mapping[str, object]) -> dict[str, Any]:
    """The first value that is not None for every key, strongest layer first."""
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged |= {key: value for key, value in layer.items() if value is not None}
    return merged


def stage_sampling(options: Mapping[str, object], sampling: Sampling, stage: str) -> Sampling:
    """`sampling` with the request's own options for one stage on top; raises BadRequest naming the key."""
    if not options:
        return sampling
    return stage_options(msgspec.to_builtins(sampling) | dict(options), Sampling, stage)


def sampling_arguments(
    sampling: Sampling, deploy: SamplingDefaults, model: Mapping[str, object], *, vocab: int, room: int
) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams for one run, all but `output_kind` and structured outputs.

    `vocab` is the size of the vocabulary; `max_tokens` is clamped to `room`, the tokens that fit after the prompt.
    """
    chosen = merge(
        {key: getattr(sampling, key) for key in DEFAULTED},
        {key: getattr(deploy, key) for key in DEFAULTED},
        {key: model.get(key) for key in DEFAULTED},
    )
    chosen["max_tokens"] = min(chosen.get("max_tokens", room), room)
    if "seed" in chosen:
        chosen["seed"] = _seed(chosen["seed"])
    if chosen.get("top_k") == -1:
        chosen["top_k"] = 0
    return chosen | {
        "frequency_penalty": sampling.frequency_penalty or 0.0,
        "presence_penalty": sampling.presence_penalty or 0.0,
        "stop": _stops(sampling.stop),
        "logit_bias": _logit_bias(sampling.logit_bias, vocab),
        "logprobs": sampling.logprobs,
        "ignore_eos": sampling.ignore_eos,
    }


def refusal(message: str, parameter: str | None, field: str = "sampling") -> BadRequest:
    """vLLM's refusal of a request as ours: about the parameter that vLLM names, else about `field`."""
    return BadRequest(message, f"sampling.{parameter}" if parameter in Sampling.__struct_fields__ else field)


def _seed(seed: int) -> int:
    if seed not in SEEDS:
        raise BadRequest(f"seed must fit in 64 bits (got {seed})", "sampling.seed")
    return seed if seed != -1 else SEEDS.stop - 1  # vLLM reads -1 as "no seed"


def _stops(stops: tuple[str, ...]) -> list[str]:
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"at most {MAX_STOPS} stop strings are allowed (got {len(stops)})", "sampling.stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise BadRequest(
                f"a stop string must have 1 to {MAX_STOP_CHARS} characters (got {len(stop)})", "sampling.stop"
            )
    return list(stops)


def _logit_bias(bias: Mapping[str, float], vocab: int) -> dict[int, float] | None:
    """Token ids to biases; JSON keys are text, so the ids come as text."""
    for token, value in bias.items():
        if not (token.isascii() and token.isdecimal() and int(token) < vocab):
            raise BadRequest(f"'{token}' is not a token id below {vocab}", "sampling.logit_bias")
        if not math.isfinite(value) or abs(value) > 100:
            raise BadRequest(f"the bias of token {token} must be in [-100, 100] (got {value})", "sampling.logit_bias")
    return {int(token): value for token, value in bias.items()} or None
