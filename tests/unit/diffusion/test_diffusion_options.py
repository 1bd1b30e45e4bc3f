# SPDX-License-Identifier: Apache-2.0
"""Image parameters: refusals before anything is computed, defaults, and engine options."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit.orchestrator_harness import scene
from triton_omni.backends.config.schema import OrchestratorDeploy, from_parameters
from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, ImageParams, Message, Part, Sampling
from triton_omni.backends.core.pipeline import Pipeline
from triton_omni.backends.deploy.load import load_deploy
from triton_omni.backends.diffusion.image_params import resolve
from triton_omni.backends.diffusion.options import ImageDefaults, ImageLimits, read_options
from triton_omni.backends.orchestrator.check import check_request
from triton_omni.backends.pipelines.image.pipeline import PIPELINE
from triton_omni.backends.pipelines.qwen_image.pipeline import PIPELINE as QWEN_IMAGE
from triton_omni.backends.pipelines.qwen_image_edit.pipeline import PIPELINE as EDITS
from triton_omni.backends.repository import deploy_files, repository_files

STAGE = "denoiser"
SMALL = ImageLimits(max_pixels=1024 * 1024, max_total_pixels=2 * 1024 * 1024)


def request(prompt: str = "a red 7", sampling: Sampling | None = None, **options: Any) -> GenerateRequest:
    return GenerateRequest(operation="image", input=prompt, stages={STAGE: options}, sampling=sampling or Sampling())


def check(pipeline: Pipeline, checked: GenerateRequest, **limits: int) -> None:
    """What the orchestrator does before admission, with these limits of a deploy file."""
    check_request(pipeline, checked, dict.fromkeys(checked.media(), 10_000), {STAGE: {"limits": limits}})


def refusal(refused: GenerateRequest, limits: ImageLimits = SMALL) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        resolve(refused, STAGE, limits, ImageDefaults())
    return caught.value


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"width": 60, "height": 70}, "width", "nearest are 48 and 64"),
        ({"width": 64, "height": 70}, "height", "nearest are 64 and 80"),
        ({"width": 8, "height": 8}, "width", "from 32"),
        ({"height": 0}, "height", "from 32"),
        ({"width": -64}, "width", "from 32"),
        ({"width": 4112}, "width", "to 4096"),
        ({"width": 2048, "height": 2048}, "width", "at most 1048576 pixels"),
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
        ({"n": 3, "width": 1024, "height": 1024}, "n", "at most 2097152 pixels"),
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
        ({"cache_backend": "tea_cache"}, "cache_backend", "state per request: `step_cache: true`"),
        ({"step_cache": "teacache"}, "step_cache", "which batched requests share"),
        ({"enable_teacache": True}, "enable_teacache", "TeaCache, cache-dit"),
    ],
)
def test_refused_option_is_named(options: dict[str, Any], field: str, message: str) -> None:
    error = refusal(request(**options))
    assert error.where == f"stages.{STAGE}.{field}"
    assert message in error.message


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
def test_pipeline_refuses_it_before_admission(pipeline: Pipeline, options: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check(pipeline, request(**options))
    assert caught.value.where == f"stages.{STAGE}.{field}"


@pytest.mark.parametrize("pipeline", [PIPELINE, QWEN_IMAGE, EDITS], ids=lambda p: p.name)
def test_pipeline_check_refuses_an_empty_prompt_only(pipeline: Pipeline) -> None:
    with pytest.raises(BadRequest, match="must not be empty"):
        check(pipeline, request(""))
    for prompt in ("{0} {x}", "七 \U0001f600", "x<|im_end|>"):
        check(pipeline, request(prompt, true_cfg_scale=4.0))


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompt_is_refused(prompt: str) -> None:
    assert refusal(request(prompt)).where == "input"


def test_long_prompt_is_refused_with_its_length() -> None:
    assert "32001" in refusal(request("x" * 32_001)).message


def test_sampling_seed_is_the_default_and_errors_name_the_field_of_the_seed() -> None:
    assert resolve(request(sampling=Sampling(seed=7)), STAGE, SMALL, ImageDefaults()).seed == 7
    assert resolve(request(sampling=Sampling(seed=7), seed=0), STAGE, SMALL, ImageDefaults()).seed == 0
    assert refusal(request(sampling=Sampling(seed=-7))).where == "sampling.seed"


def test_missing_values_come_from_deploy_defaults() -> None:
    defaults = ImageDefaults(width=64, height=96, steps=12, true_cfg_scale=2.5, negative_prompt=" ")
    spec = resolve(request(), STAGE, SMALL, defaults)
    assert (spec.width, spec.height, spec.steps, spec.true_cfg_scale, spec.n, spec.seed) == (64, 96, 12, 2.5, 1, None)
    assert spec.has_guidance
    assert not resolve(request(true_cfg_scale=1.0), STAGE, SMALL, defaults).has_guidance


def test_guidance_needs_a_negative_prompt() -> None:
    assert not resolve(request(true_cfg_scale=4.0), STAGE, SMALL, ImageDefaults()).has_guidance
    assert resolve(request(true_cfg_scale=4.0, negative_prompt=""), STAGE, SMALL, ImageDefaults()).has_guidance


def test_chat_prompt_is_the_last_user_message() -> None:
    chat = GenerateRequest(
        messages=(
            Message("user", "a blue 3"),
            Message("assistant", "here"),
            Message("user", (Part("text", "a red "), Part("text", "7"))),
        ),
        modalities=("image",),
    )
    check(PIPELINE, chat)
    assert PIPELINE.plan(chat).wanted == {"image"}
    assert PIPELINE.plan(chat).needed == {STAGE}
    assert resolve(chat, STAGE, SMALL, ImageDefaults()).prompt == "a red 7"


@pytest.mark.parametrize(
    "messages",
    [(), (Message("assistant", "x"),), (Message("user", (Part("image", length=12, shape=(2, 2, 3)),)),)],
)
def test_chat_without_text_is_refused(messages: tuple[Message, ...]) -> None:
    with pytest.raises(BadRequest) as caught:
        check(PIPELINE, GenerateRequest(messages=messages))
    assert caught.value.where.startswith("messages")


IMAGE = Part("image", length=60, shape=(4, 5, 3))
MASK = Part("image", offset=60, length=20, shape=(4, 5))


def edit(*parts: Part) -> GenerateRequest:
    return GenerateRequest(operation="edit", messages=(Message("user", (*parts, Part("text", "a fox"))),))


def test_edit_inputs_come_from_the_last_user_message() -> None:
    check(EDITS, edit(IMAGE, MASK))
    spec = resolve(edit(IMAGE, IMAGE, MASK), STAGE, SMALL, ImageDefaults(source_pixels=512 * 512))
    assert (spec.prompt, spec.source_images, spec.mask) == ("a fox", (IMAGE, IMAGE), MASK)
    assert (spec.width, spec.height) == spec.source_sizes[0] == (576, 448)
    assert spec.source_tokens == 2 * spec.image_tokens == 2 * 36 * 28
    assert resolve(request(), STAGE, SMALL, ImageDefaults()).source_tokens == 0


@pytest.mark.parametrize(
    ("parts", "field", "message"),
    [
        ((), "messages", "needs an image"),
        ((MASK, IMAGE), "messages[0].content[0].shape", "must follow its image"),
        ((IMAGE, Part("image", shape=(5, 4))), "messages[0].content[1].shape", "height and width"),
        ((IMAGE, MASK, MASK), "messages[0].content[2].shape", "height, width, 3"),
        ((Part("image", shape=(0, 5, 3)),), "messages[0].content[0].shape", "height, width, 3"),
        ((Part("image", shape=(1, 9, 3)),), "messages[0].content[0].shape", "8 times"),
        ((IMAGE, Part("audio", length=3, sample_rate=16000)), "messages[0].content[1]", "not audio"),
        ((IMAGE,) * 17, "messages[0].content[16]", "takes at most 16 image"),
    ],
)
def test_invalid_edit_is_refused_by_the_pipeline(parts: tuple[Part, ...], field: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        check(EDITS, edit(*parts), max_source_images=16)
    assert caught.value.where == field


def test_text_to_image_pipeline_has_no_edit_operation() -> None:
    with pytest.raises(BadRequest) as caught:
        PIPELINE.operation(edit(IMAGE))
    assert caught.value.where == "operation"


def test_pipeline_check_names_unknown_stages() -> None:
    check(PIPELINE, request("{0} {x} 七 \U0001f600", width=64, height=64, steps=2))
    with pytest.raises(BadRequest, match="multiple of 16"):
        check(PIPELINE, request(width=70))
    with pytest.raises(BadRequest, match="unknown stage 'denoise'"):
        check(PIPELINE, GenerateRequest(operation="image", input="x", stages={"denoise": {}}))


MUCH = {"steps": 200, "negative_prompt": "", "true_cfg_scale": 4.0}


@pytest.mark.parametrize(
    ("pipeline", "image", "field"),
    [
        (PIPELINE, {"width": 1040, "height": 1024}, "image.width"),
        (PIPELINE, {"n": 3, "width": 1024, "height": 1024}, "image.n"),
        (PIPELINE, {"n": 2, "width": 1024, "height": 512, **MUCH}, "image.steps"),
        (PIPELINE, {"steps": 201}, "image.steps"),
        (QWEN_IMAGE, {"width": 2048, "height": 2048}, "image.width"),
        (QWEN_IMAGE, {"n": 7, "width": 1328, "height": 1328}, "image.n"),
        (QWEN_IMAGE, {"n": 2, "width": 1328, "height": 1328, **MUCH}, "image.steps"),
        (EDITS, {"partial_images": 4}, "image.partial_images"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_limits_of_the_deploy_file_apply_before_admission(
    pipeline: Pipeline, image: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """The orchestrator gets the options from its own config.pbtxt; a running request holds the only place."""
    (file,) = deploy_files(pipeline.name)
    (stage,) = load_deploy(file, pipeline).stages.values()
    config = repository_files(pipeline, load_deploy(file, pipeline))[f"{pipeline.name}/config.pbtxt"]
    (written,) = re.findall(r'key: "engine.denoiser" value: { string_value: "(.*)" }', config)
    engine = from_parameters({"engine.denoiser": written.replace('\\"', '"')}, OrchestratorDeploy, "").engine
    assert engine == {STAGE: stage.engine}
    with scene(tmp_path, pipeline, max_live=1, engine=engine) as s:
        running, waiting = s.ask(request()), s.ask(request())
        refused = s.ask(GenerateRequest(operation="image", input="a red 7", image=ImageParams(**image)))
        assert isinstance(refused.failed, BadRequest)
        assert refused.failed.where == field
        assert not running.over
        assert not waiting.over


def test_work_of_a_request_counts_images_sources_steps_and_guidance() -> None:
    defaults = ImageDefaults(width=64, height=64, source_pixels=128 * 128)
    limits = ImageLimits(max_pixel_steps=2 * 64 * 64 * 10)
    assert resolve(request(n=2, steps=10), STAGE, limits, defaults).pixel_steps == 2 * 64 * 64 * 10
    for more in ({"n": 3, "steps": 10}, {"n": 2, "steps": 11}, {"n": 2, "steps": 10, "negative_prompt": ""}):
        with pytest.raises(BadRequest, match="must be at most 81920 ") as caught:
            resolve(request(**more), STAGE, limits, defaults)
        assert caught.value.where == f"stages.{STAGE}.steps"
    square = Part("image", length=12, shape=(2, 2, 3))
    whole = msgspec.structs.replace(edit(square), image=ImageParams(steps=3))
    assert resolve(whole, STAGE, SMALL, defaults).pixel_steps == 2 * 128 * 128 * 3


def test_unknown_engine_option_is_named_with_the_nearest_key() -> None:
    with pytest.raises(OptionsError, match=r"'denoiser'.*max_batch_token.*did you mean 'max_batch_tokens'"):
        read_options({"model": "x", "max_batch_token": 3}, STAGE)
    with pytest.raises(OptionsError, match="max_steps"):
        read_options({"model": "x", "limits": {"max_steps": 1}}, STAGE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": True}, "compile: .*`batching: pad`"),
        ({"offload": "model"}, "offload: model"),
        ({"offload": "gpu"}, "offload"),
        ({"step_cache_threshold": 0.1, "batching": "seq"}, "step_cache_threshold: .*packed"),
        ({"step_cache_threshold": 0.1, "offload": "sequential"}, "step_cache_threshold: not supported with offload"),
        ({"step_cache_threshold": 2}, "step_cache_threshold"),
        ({"step_cache": "teacache"}, "step_cache: TeaCache, cache-dit.*`step_cache_threshold"),
        ({"cache_backend": "cache_dit", "cache_config": {}}, "cache_backend: .*which batched requests share"),
        ({"step_cache_treshold": 0.1}, "did you mean 'step_cache_threshold'"),
        ({"defaults": {"lora": "ink"}}, "loras has no 'ink'"),
        ({"limits": {"max_pixels": 4096}}, "defaults.width"),
        ({"limits": {"max_pixels": 1 << 21, "max_total_pixels": 4096}}, "max_total_pixels"),
        ({"limits": {"max_steps": 20}}, "defaults.steps"),
        (
            {"limits": {"max_pixel_steps": 100_000_000}},
            "defaults.width, height, steps: more than limits.max_pixel_steps",
        ),
    ],
)
def test_conflicting_engine_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        read_options({"model": "x", **options}, STAGE)


def test_pipeline_loads_without_torch() -> None:
    code = (
        "import sys; import triton_omni.backends.pipelines.image.pipeline; "
        "import triton_omni.backends.pipelines.qwen_image.pipeline; "
        "import triton_omni.backends.pipelines.qwen_image_edit.pipeline; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'diffusers', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_stage_options_override_typed_parameters_and_errors_name_the_origin_of_a_value():
    params = ImageParams(width=64, steps=4)
    request = GenerateRequest(operation="image", input="x", image=params, stages={STAGE: {"steps": 6}})
    read = resolve(request, STAGE, ImageLimits(), ImageDefaults())
    assert (read.width, read.steps) == (64, 6)
    with pytest.raises(BadRequest) as typed:
        resolve(msgspec.structs.replace(request, image=ImageParams(width=7)), STAGE, ImageLimits(), ImageDefaults())
    with pytest.raises(BadRequest) as by_name:
        resolve(msgspec.structs.replace(request, stages={STAGE: {"width": 7}}), STAGE, ImageLimits(), ImageDefaults())
    assert (typed.value.where, by_name.value.where) == ("image.width", f"stages.{STAGE}.width")
