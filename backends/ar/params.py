# SPDX-License-Identifier: Apache-2.0
"""vLLM's SamplingParams from ours, and vLLM's refusals as ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine

from triton_omni.backends.ar.hooks import RUN_KEY
from triton_omni.backends.ar.options import ArOptions, SamplingDefaults
from triton_omni.backends.ar.sampling import refusal, sampling_arguments
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import Sampling

REFUSALS = (VLLMClientError, ValueError)
"""Exceptions by which vLLM refuses a request."""


@dataclass(frozen=True)
class ParamDefaults:
    """Sampling defaults of the deploy file and of the model, and the size of the vocabulary; read once per engine."""

    deploy: SamplingDefaults
    model: Mapping[str, object]
    vocab: int

    @classmethod
    def of(cls, llm: LLMEngine, options: ArOptions) -> ParamDefaults:
        model = llm.model_config
        return cls(options.sampling, model.get_diff_sampling_param(), model.get_vocab_size())


def vllm_params(
    sampling: Sampling,
    defaults: ParamDefaults,
    *,
    room: int,
    key: str,
    grammar: str | None = None,
    end_token: int | None = None,
    min_tokens: int = 0,
) -> SamplingParams:
    """Parameters of run `key`, of which `room` tokens fit after the prompt; raises BadRequest naming the field.

    `grammar` is a structural tag the text must follow; `end_token` ends a run whose tokens are not text,
    behind `min_tokens` others.
    """
    arguments = sampling_arguments(sampling, defaults.deploy, defaults.model, vocab=defaults.vocab, room=room)
    structure = _structure(sampling.json_schema, grammar)
    try:
        return SamplingParams(
            **arguments,
            structured_outputs=structure,
            output_kind=RequestOutputKind.DELTA,
            stop_token_ids=None if end_token is None else [end_token],
            min_tokens=min(min_tokens, arguments["max_tokens"]),
            detokenize=end_token is None,
            extra_args={RUN_KEY: key},
        )
    except REFUSALS as error:
        raise refusal_of(error) from None


def _structure(schema: dict[str, object] | None, grammar: str | None) -> StructuredOutputsParams | None:
    if grammar is not None:
        return StructuredOutputsParams(structural_tag=grammar)
    return None if schema is None else StructuredOutputsParams(json=schema)


def refusal_of(error: Exception, field: str = "sampling") -> BadRequest:
    """A BadRequest for one of REFUSALS; see sampling.refusal."""
    parameter = error.parameter if isinstance(error, VLLMValidationError) else None
    return refusal(str(error), parameter, field)


def is_refused(llm: LLMEngine, params: SamplingParams) -> bool:
    """Whether vLLM refuses these parameters, whatever the prompt."""
    config = llm.vllm_config
    tokenizer = llm.renderer.get_tokenizer()
    try:
        params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer)
    except REFUSALS:
        return True
    return False
