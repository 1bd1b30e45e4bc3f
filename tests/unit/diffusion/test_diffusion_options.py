# SPDX-License-Identifier: Apache-2.0
"""Every request a diffusion stage refuses before anything is computed, with the field it names."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, ImageParams, Message, Part, Sampling
from triton_omni.backends.core.pipeline import Pipeline
from triton_omni.backends.diffusion.image_params import read_wish
from triton_omni.backends.diffusion.options import Defaults, Limits, read_options
from triton_omni.backends.pipelines.image.pipeline import PIPELINE
from triton_omni.backends.pipelines.qwen_image.pipeline import PIPELINE as QWEN_IMAGE
from triton_omni.backends.pipelines.qwen_image_edit.pipeline import PIPELINE as EDITS

STAGE = "denoiser"
SMALL = Limits(max_pixels=1024 * 1024, max_total_pixels=2 * 1024 * 1024)


def request(prompt: str = "a red 7", sampling: Sampling | None = None, **options: Any) -> GenerateRequest:
    return GenerateRequest(operation="image", input=prompt, stages={STAGE: options}, sampling=sampling or Sampling())


def refusal(given: GenerateRequest, limits: Limits = SMALL) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_wish(given, STAGE, limits, Defaults())
    return caught.value


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"width": 60, "height": 70}, "width", "nearest are 48 and 64"),
        ({"width": 64, "height": 70}, "height", "nearest are 64 and 80"),
        ({"width": 8, "height": 8}, "width", "from 32"),
        ({"height": 0}, "height", "from 32"),
        ({"width": -64}, "width", "from 32"),
        ({"width": 4112}, "width", "to 4096"),
        ({"width": 2048, "height": 2048}, "width", "1048576 pixels"),
        ({"width": "64"}, "width", "Expected `int"),
        ({"width": 64.0}, "width", "Expected `int"),
        ({"width": True}, "width", "Expected `int"),
        ({"steps": 0}, "steps", "from 2"),
        ({"steps": 1}, "steps", "from 2"),
        ({"steps": -1}, "steps", "from 2"),
        ({"steps": 300}, "steps", "to 200"),
        ({"steps": 1.5}, "steps", "Expected `int"),
        ({"n": 0}, "n", "from 1"),
        ({"n": -1}, "n", "from 1"),
        ({"n": 11}, "n", "to 10"),
        ({"n": 3, "width": 1024, "height": 1024}, "n", "more than 2097152 pixels"),
        ({"partial_images": 4}, "partial_images", "to 3"),
        ({"partial_images": -1}, "partial_images", "from 0"),
        ({"true_cfg_scale": math.nan}, "true_cfg_scale", "nan"),
        ({"true_cfg_scale": math.inf}, "true_cfg_scale", "inf"),
        ({"true_cfg_scale": -3}, "true_cfg_scale", "from 0"),
        ({"true_cfg_scale": 20.5}, "true_cfg_scale", "to 20"),
        ({"guidance_scale": math.inf}, "guidance_scale", "inf"),
        ({"seed": -1}, "seed", "from 0"),
        ({"seed": 2**63}, "seed", "from 0"),
        ({"seed": "7"}, "seed", "`int"),
        ({"negative_prompt": 5}, "negative_prompt", "`str"),
        ({"negative_prompt": "x" * 32_001}, "negative_prompt", "32000"),
        ({"num_inference_steps": 4}, "num_inference_steps", "unknown field"),
        ({"step": 4}, "step", "did you mean 'steps'"),
        ({"cache_backend": "tea_cache"}, "cache_backend", "first-block cache: `step_cache: true`"),
        ({"step_cache": "teacache"}, "step_cache", "where requests that share steps would meet"),
        ({"enable_teacache": True}, "enable_teacache", "TeaCache, cache-dit"),
    ],
)
def test_an_option_that_cannot_be_served_is_named(options: dict[str, Any], field: str, says: str) -> None:
    error = refusal(request(**options))
    assert error.where == f"stages.{STAGE}.{field}"
    assert says in error.message


@pytest.mark.parametrize("pipeline", [PIPELINE, QWEN_IMAGE, EDITS], ids=lambda p: p.name)
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"width": 60, "height": 70}, "width"),
        ({"width": 8, "height": 8}, "width"),
        ({"height": 0}, "height"),
        ({"width": -64}, "width"),
        ({"n": -1}, "n"),
        ({"n": 0}, "n"),
        ({"n": 11}, "n"),
        ({"steps": 0}, "steps"),
        ({"steps": 1}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"steps": 300}, "steps"),
        ({"true_cfg_scale": math.nan}, "true_cfg_scale"),
        ({"true_cfg_scale": math.inf}, "true_cfg_scale"),
        ({"true_cfg_scale": -3}, "true_cfg_scale"),
        ({"width": 65_536, "height": 65_536}, "width"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_the_thin_stub_refuses_it_already(pipeline: Pipeline, options: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        pipeline.check(request(**options))
    assert caught.value.where == f"stages.{STAGE}.{field}"


@pytest.mark.parametrize("pipeline", [PIPELINE, QWEN_IMAGE, EDITS], ids=lambda p: p.name)
def test_the_thin_stub_refuses_an_empty_prompt_and_takes_any_other(pipeline: Pipeline) -> None:
    with pytest.raises(BadRequest, match="needs a description"):
        pipeline.check(request(""))
    for prompt in ("{0} {x}", "七 \U0001f600", "x<|im_end|>"):
        pipeline.check(request(prompt, true_cfg_scale=4.0))


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_a_picture_needs_a_description(prompt: str) -> None:
    assert refusal(request(prompt)).where == "input"


def test_a_description_has_a_length() -> None:
    assert "32001" in refusal(request("x" * 32_001)).message


def test_seed_of_sampling_counts_and_is_checked_where_it_stands() -> None:
    assert read_wish(request(sampling=Sampling(seed=7)), STAGE, SMALL, Defaults()).seed == 7
    assert read_wish(request(sampling=Sampling(seed=7), seed=0), STAGE, SMALL, Defaults()).seed == 0
    assert refusal(request(sampling=Sampling(seed=-7))).where == "sampling.seed"


def test_what_is_not_said_comes_from_deploy() -> None:
    defaults = Defaults(width=64, height=96, steps=12, true_cfg_scale=2.5, negative_prompt=" ")
    wish = read_wish(request(), STAGE, SMALL, defaults)
    assert (wish.width, wish.height, wish.steps, wish.true_cfg_scale, wish.n, wish.seed) == (64, 96, 12, 2.5, 1, None)
    assert wish.has_guidance
    assert not read_wish(request(true_cfg_scale=1.0), STAGE, SMALL, defaults).has_guidance


def test_guidance_without_a_negative_prompt_is_no_guidance() -> None:
    assert not read_wish(request(true_cfg_scale=4.0), STAGE, SMALL, Defaults()).has_guidance
    assert read_wish(request(true_cfg_scale=4.0, negative_prompt=""), STAGE, SMALL, Defaults()).has_guidance


def test_a_chat_draws_its_last_user_message() -> None:
    chat = GenerateRequest(
        messages=(
            Message("user", "a blue 3"),
            Message("assistant", "here"),
            Message("user", (Part("text", "a red "), Part("text", "7"))),
        ),
        modalities=("image",),
    )
    PIPELINE.check(chat)
    assert PIPELINE.wanted(chat) == {"image"}
    assert PIPELINE.needed(chat) == {STAGE}
    assert read_wish(chat, STAGE, SMALL, Defaults()).prompt == "a red 7"


@pytest.mark.parametrize(
    "messages",
    [(), (Message("assistant", "x"),), (Message("user", (Part("image", length=12, shape=(2, 2, 3)),)),)],
)
def test_a_chat_without_text_to_draw_is_refused(messages: tuple[Message, ...]) -> None:
    with pytest.raises(BadRequest) as caught:
        PIPELINE.check(GenerateRequest(messages=messages))
    assert caught.value.where.startswith("messages")


PICTURE = Part("image", length=60, shape=(4, 5, 3))
MASK = Part("image", offset=60, length=20, shape=(4, 5))


def edit(*parts: Part) -> GenerateRequest:
    return GenerateRequest(operation="edit", messages=(Message("user", (*parts, Part("text", "a fox"))),))


def test_an_edit_is_read_from_the_last_user_message() -> None:
    EDITS.check(edit(PICTURE, MASK))
    wish = read_wish(edit(PICTURE, PICTURE, MASK), STAGE, SMALL, Defaults(source_pixels=512 * 512))
    assert (wish.prompt, wish.pictures, wish.mask) == ("a fox", (PICTURE, PICTURE), MASK)
    assert (wish.width, wish.height) == wish.sources[0] == (576, 448)
    assert wish.source_tokens == 2 * wish.picture_tokens == 2 * 36 * 28
    assert read_wish(request(), STAGE, SMALL, Defaults()).source_tokens == 0


@pytest.mark.parametrize(
    ("parts", "place", "says"),
    [
        ((), "messages", "needs a picture"),
        ((MASK, PICTURE), "messages[0].content[0].shape", "follows its picture"),
        ((PICTURE, Part("image", shape=(5, 4))), "messages[0].content[1].shape", "height and width"),
        ((PICTURE, MASK, MASK), "messages[0].content[2].shape", "height, width, 3"),
        ((Part("image", shape=(0, 5, 3)),), "messages[0].content[0].shape", "height, width, 3"),
        ((Part("image", shape=(1, 9, 3)),), "messages[0].content[0].shape", "8 times"),
        ((PICTURE, Part("audio", length=3, sample_rate=16000)), "messages[0].content[1]", "not from audio"),
        ((PICTURE,) * 17, "messages[0].content[16]", "takes 16 at a time"),
    ],
)
def test_what_is_no_edit_is_refused_before_any_stage_works(parts: tuple[Part, ...], place: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        EDITS.check(edit(*parts))
    assert caught.value.where == place


def test_a_pipeline_that_only_draws_edits_nothing() -> None:
    with pytest.raises(BadRequest) as caught:
        PIPELINE.operation(edit(PICTURE))
    assert caught.value.where == "operation"


def test_the_pipeline_refuses_before_any_stage_works() -> None:
    PIPELINE.check(request("{0} {x} 七 \U0001f600", width=64, height=64, steps=2))
    with pytest.raises(BadRequest, match="multiple of 16"):
        PIPELINE.check(request(width=70))
    with pytest.raises(BadRequest, match="unknown stage 'denoise'"):
        PIPELINE.check(GenerateRequest(operation="image", input="x", stages={"denoise": {}}))


def test_an_unknown_deploy_key_is_named_with_the_nearest() -> None:
    with pytest.raises(OptionsError, match=r"'denoiser'.*max_batch_token.*did you mean 'max_batch_tokens'"):
        read_options({"model": "x", "max_batch_token": 3}, STAGE)
    with pytest.raises(OptionsError, match="max_steps"):
        read_options({"model": "x", "limits": {"max_steps": 1}}, STAGE)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compile": True}, "compile: .*`batching: pad`"),
        ({"offload": "model"}, "offload: model"),
        ({"offload": "gpu"}, "offload"),
        ({"step_cache_threshold": 0.1, "batching": "seq"}, "step_cache_threshold: .*packed"),
        ({"step_cache_threshold": 0.1, "offload": "sequential"}, "step_cache_threshold: not with offload"),
        ({"step_cache_threshold": 2}, "step_cache_threshold"),
        ({"step_cache": "teacache"}, "step_cache: TeaCache, cache-dit.*`step_cache_threshold"),
        ({"cache_backend": "cache_dit", "cache_config": {}}, "cache_backend: .*requests that share steps would meet"),
        ({"step_cache_treshold": 0.1}, "did you mean 'step_cache_threshold'"),
        ({"defaults": {"lora": "ink"}}, "loras has no 'ink'"),
        ({"limits": {"max_pixels": 4096}}, "defaults.width"),
        ({"limits": {"max_pixels": 1 << 21, "max_total_pixels": 4096}}, "max_total_pixels"),
        ({"limits": {"max_steps": 20}}, "defaults.steps"),
    ],
)
def test_deploy_values_that_contradict_one_another_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionsError, match=says):
        read_options({"model": "x", **options}, STAGE)


def test_the_pipeline_loads_without_torch() -> None:
    code = (
        "import sys; import triton_omni.backends.pipelines.image.pipeline; "
        "import triton_omni.backends.pipelines.qwen_image.pipeline; "
        "import triton_omni.backends.pipelines.qwen_image_edit.pipeline; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'diffusers', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_stage_options_override_the_typed_parameters_and_errors_name_where_a_value_came_from():
    params = ImageParams(width=64, steps=4)
    request = GenerateRequest(operation="image", input="x", image=params, stages={STAGE: {"steps": 6}})
    read = read_wish(request, STAGE, Limits(), Defaults())
    assert (read.width, read.steps) == (64, 6)
    with pytest.raises(BadRequest) as typed:
        read_wish(msgspec.structs.replace(request, image=ImageParams(width=7)), STAGE, Limits(), Defaults())
    with pytest.raises(BadRequest) as by_name:
        read_wish(msgspec.structs.replace(request, stages={STAGE: {"width": 7}}), STAGE, Limits(), Defaults())
    assert (typed.value.where, by_name.value.where) == ("image.width", f"stages.{STAGE}.width")
