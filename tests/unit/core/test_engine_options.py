# SPDX-License-Identifier: Apache-2.0
"""The `engine:` section of a stage: one reader for all stages, which names the key and the nearest known one."""

from __future__ import annotations

import msgspec
import pytest

from triton_omni.backends.core.engine import OptionsError, read_engine_options


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    max_steps: int = 1


class Example(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    limits: Limits = msgspec.field(default_factory=Limits)


def test_options_are_typed():
    assert read_engine_options({"model": "m", "limits": {"max_steps": 3}}, Example, "s").limits.max_steps == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "m", "limit": {}}, "unknown field `limit`; did you mean 'limits'"),
        ({"model": "m", "limits": {"max_step": 3}}, "did you mean 'max_steps'"),
        ({}, "missing required field `model`"),
        ({"model": 3}, r"\$.model"),
    ],
)
def test_what_is_wrong_names_stage_and_key(options, words):
    with pytest.raises(OptionsError, match=f"stage 'denoiser', engine options: .*{words}"):
        read_engine_options(options, Example, "denoiser")
