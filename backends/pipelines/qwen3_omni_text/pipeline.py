# SPDX-License-Identifier: Apache-2.0
"""Pipeline `qwen3_omni_text`: Qwen3-Omni's thinker alone, for checkpoints without a voice (Captioner, Thinking)."""

from __future__ import annotations

from triton_omni.backends.ar.completions import completion_by
from triton_omni.backends.core.pipeline import Operation, Output, Pipeline
from triton_omni.backends.pipelines.qwen3_omni.checks import check_for
from triton_omni.backends.pipelines.qwen3_omni.pipeline import THINKER

PIPELINE = Pipeline(
    name="qwen3_omni_text",
    stages=(THINKER,),
    edges=(),
    outputs=(Output("text", "thinker"),),
    operations=(Operation("chat", "thinker", ("text",)), completion_by("thinker")),
    check=check_for("thinker"),
)
