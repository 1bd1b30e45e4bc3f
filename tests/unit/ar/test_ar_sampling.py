# SPDX-License-Identifier: Apache-2.0
"""Who wins when request, deploy file and model disagree, and what is refused."""

from __future__ import annotations

import math

import pytest

from triton_omni.backends.ar.options import SamplingDefaults
from triton_omni.backends.ar.sampling import refusal, sampling_arguments, stage_sampling
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import Sampling


def arguments(sampling=None, deploy=None, model=None, room=100):
    return sampling_arguments(sampling or Sampling(), deploy or SamplingDefaults(), model or {}, vocab=50, room=room)


def test_request_beats_deploy_beats_model():
    model = {"temperature": 0.3, "top_p": 0.3, "top_k": 3, "repetition_penalty": 1.3}
    deploy = SamplingDefaults(temperature=0.2, top_p=0.2, top_k=2)
    found = arguments(Sampling(temperature=0.1, top_p=0.1), deploy, model)
    assert (found["temperature"], found["top_p"], found["top_k"], found["repetition_penalty"]) == (0.1, 0.1, 2, 1.3)


def test_zero_is_a_value_of_its_own():
    assert arguments(Sampling(temperature=0.0), SamplingDefaults(temperature=0.7))["temperature"] == 0.0
    assert arguments(Sampling(seed=0), SamplingDefaults(seed=7))["seed"] == 0
    assert arguments(Sampling(logprobs=0))["logprobs"] == 0


def test_unset_parameters_are_left_to_vllm():
    assert not {"temperature", "top_p", "seed"} & set(arguments())


def test_max_tokens_never_exceeds_the_room():
    assert arguments(room=7)["max_tokens"] == 7
    assert arguments(Sampling(max_tokens=5), room=7)["max_tokens"] == 5
    for more_than_the_context in (5000, 10**9):
        assert arguments(Sampling(max_tokens=more_than_the_context), room=7)["max_tokens"] == 7


def test_a_seed_of_minus_one_is_still_a_seed():
    found = arguments(Sampling(seed=-1))["seed"]
    assert found == arguments(Sampling(seed=-1))["seed"] != -1


def test_minus_one_top_k_means_all():
    assert arguments(Sampling(top_k=-1))["top_k"] == 0


@pytest.mark.parametrize(
    ("sampling", "where"),
    [
        (Sampling(seed=2**63), "sampling.seed"),
        (Sampling(seed=-(2**63) - 1), "sampling.seed"),
        (Sampling(stop=("a", "")), "sampling.stop"),
        (Sampling(stop=("a" * 257,)), "sampling.stop"),
        (Sampling(stop=("a",) * 17), "sampling.stop"),
        (Sampling(logit_bias={"x": 1.0}), "sampling.logit_bias"),
        (Sampling(logit_bias={"-1": 1.0}), "sampling.logit_bias"),
        (Sampling(logit_bias={"50": 1.0}), "sampling.logit_bias"),
        (Sampling(logit_bias={"²": 1.0}), "sampling.logit_bias"),
        (Sampling(logit_bias={"1": 101.0}), "sampling.logit_bias"),
        (Sampling(logit_bias={"1": math.nan}), "sampling.logit_bias"),
    ],
)
def test_refused_values_name_their_field(sampling, where):
    with pytest.raises(BadRequest) as caught:
        arguments(sampling)
    assert caught.value.where == where


def test_stage_options_beat_the_request():
    merged = stage_sampling({"temperature": 0.5, "stop": ["x"]}, Sampling(temperature=0.1, top_k=4), "thinker")
    assert merged == Sampling(temperature=0.5, top_k=4, stop=("x",))
    assert stage_sampling({}, Sampling(top_k=4), "thinker") == Sampling(top_k=4)


@pytest.mark.parametrize(("options", "where"), [({"temperature": 9}, "temperature"), ({"temprature": 1}, "temprature")])
def test_wrong_stage_options_name_stage_and_key(options, where):
    with pytest.raises(BadRequest) as caught:
        stage_sampling(options, Sampling(), "thinker")
    assert caught.value.where == f"stages.thinker.{where}"


def test_a_refusal_by_vllm_names_the_field_it_is_about():
    assert refusal("no", "top_p").where == "sampling.top_p"
    assert refusal("no", None).where == "sampling"
    assert refusal("no", "n").where == "sampling"
    assert refusal("no", None, "messages").where == "messages"
