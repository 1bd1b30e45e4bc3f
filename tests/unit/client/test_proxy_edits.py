# SPDX-License-Identifier: Apache-2.0
"""/v1/images/edits through the real SDK."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.kit.fake_backend import FakeBackend
from tests.kit.proxy_server import RunningProxy
from triton_omni.backends.core.generate import ImageParams
from triton_omni.media.limits import MAX_PIXELS


def file(mode: str = "RGB", size: tuple[int, int] = (6, 4), kind: str = "png", colour: Any = None) -> bytes:
    """An image of one colour as a file."""
    target = io.BytesIO()
    Image.new(mode, size, colour or (10, 20, 30, 0)[: len(mode)]).save(target, kind)
    return target.getvalue()


def half_mask(width: int = 6, height: int = 4) -> bytes:
    """Transparent on the right."""
    mask = Image.new("RGBA", (width, height), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (width // 2, 0, width, height))
    target = io.BytesIO()
    mask.save(target, "png")
    return target.getvalue()


CUT_OFF = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\npainter\r\n--x\r\n'


def edit(sdk: openai.OpenAI, **more: Any) -> Any:
    return sdk.images.edit(**{"model": "painter", "prompt": "a fox", "image": file(), **more})


def test_an_image_and_its_mask_travel_as_pixels(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.usage = {"prompt_tokens": 30.0, "prompt_image_tokens": 25.0}
    answer = edit(
        sdk, mask=half_mask(), n=2, size="32x16", quality="high", output_format="webp", output_compression=50,
        background="auto", input_fidelity="low", response_format="b64_json", user="me",
        extra_body={"num_inference_steps": 5, "true_cfg_scale": 4.5, "negative_prompt": "7", "seed": 7,
                    "stages": {"denoiser": {"guidance_scale": 2.5}}},
    )  # fmt: skip
    assert [Image.open(io.BytesIO(base64.b64decode(d.b64_json))).format for d in answer.data] == ["WEBP", "WEBP"]
    assert (answer.size, answer.quality) == ("32x16", "high")
    details = answer.usage.input_tokens_details
    assert (answer.usage.input_tokens, details.text_tokens, details.image_tokens) == (30, 5, 25)
    (seen,) = backend.seen
    assert seen.request.operation == "edit"
    assert seen.request.stages == {"denoiser": {"guidance_scale": 2.5}}
    assert seen.request.image == ImageParams(
        width=32, height=16, n=2, steps=5, true_cfg_scale=4.5, negative_prompt="7", seed=7
    )
    image, mask, text = seen.request.messages[0].parts
    assert (image.shape, mask.shape, text.text) == ((4, 6, 3), (4, 6), "a fox")
    pixels = seen.media["image"]
    assert pixels.dtype == np.uint8
    assert pixels[:72].reshape(4, 6, 3)[0, 0].tolist() == [10, 20, 30]
    assert (mask.offset, mask.length) == (72, 24)
    assert pixels[72:].reshape(4, 6).tolist() == [[0, 0, 0, 255, 255, 255]] * 4


def test_several_images_in_order(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    edit(sdk, image=[file(size=(6, 4)), file(size=(3, 5), kind="jpeg"), file("L", (2, 2), "webp", 9)])
    parts = backend.seen[0].request.messages[0].parts
    assert [p.shape for p in parts[:-1]] == [(4, 6, 3), (5, 3, 3), (2, 2, 3)]
    assert [p.offset for p in parts[:-1]] == [0, 72, 117]


def test_previews_then_the_image(sdk: openai.OpenAI) -> None:
    events = list(edit(sdk, stream=True, partial_images=2))
    assert [e.type for e in events] == ["image_edit.partial_image"] * 2 + ["image_edit.completed"]
    assert events[2].usage.total_tokens == 12


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"prompt": " "}, "prompt", "missing_required_parameter"),
        ({"image": b"no image"}, "image", "invalid_image"),
        ({"image": file(size=(8192, MAX_PIXELS // 8192 + 1))}, "image", "invalid_image"),
        ({"image": file()[:-30]}, "image", "invalid_image"),
        ({"image": [file()] * 17, "mask": file()}, "image", "invalid_value"),
        ({"mask": half_mask(4, 4)}, "mask", "invalid_value"),
        ({"mask": file()}, "mask", "invalid_image"),
        ({"mask": file(kind="jpeg")}, "mask", "invalid_image"),
        ({"n": 11}, "n", "invalid_value"),
        ({"n": 1.5}, "n", "invalid_type"),
        ({"size": "big"}, "size", "invalid_value"),
        ({"background": "transparent"}, "background", "unsupported_value"),
        ({"partial_images": 2}, "partial_images", "invalid_value"),
        ({"input_fidelity": "some"}, "input_fidelity", "unsupported_value"),
        ({"extra_body": {"seed": "x"}}, "seed", "invalid_type"),
        ({"extra_body": {"guidance_scale": "NaN"}}, "guidance_scale", "invalid_type"),
        ({"extra_body": {"seed": "Infinity"}}, "seed", "invalid_type"),
        ({"extra_body": {"steps": 3}}, "steps", "unknown_parameter"),
        ({"extra_body": {"stages[denoiser][steps]s": 3}}, "stages[denoiser][steps]s", "unknown_parameter"),
    ],
)
def test_bad_input_names_the_parameter_and_never_reaches_the_server(
    sdk: openai.OpenAI, backend: FakeBackend, more: dict[str, Any], param: str | None, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        edit(sdk, **more)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert not backend.seen


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"json": {"model": "painter", "prompt": "x"}}, None, "invalid_form"),
        (
            {"files": {"other": b"x"}, "data": {"model": "painter", "prompt": "x"}},
            "image",
            "missing_required_parameter",
        ),
        ({"files": {"image": file(), "prompt": b"x"}, "data": {"model": "painter"}}, "prompt", "invalid_type"),
        ({"files": {"mask": b"x"}, "data": {"model": "painter", "image": "x"}}, "image", "invalid_type"),
        ({"files": {"image": file()}, "data": {"model": "painter", "prompt": ["x", "y"]}}, "prompt", "invalid_value"),
        ({"files": {"image": file()}, "data": {"n": "1", "n[a]": "2"}}, "n", "invalid_type"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, None, "invalid_form"),
        ({"content": CUT_OFF, "headers": {"content-type": "multipart/form-data; boundary=x"}}, None, "invalid_form"),
        ({"files": [(f"f{i}", b"x") for i in range(33)]}, None, "invalid_form"),
    ],
)
def test_a_form_that_is_none(proxy: RunningProxy, given: dict[str, Any], param: str | None, code: str) -> None:
    answer = httpx.post(f"{proxy.root}/v1/images/edits", **given)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error


@pytest.mark.parametrize(
    ("where", "param"),
    [
        ("messages[0].content[0].shape", "image"),
        ("messages[0].content[1]", "mask"),
        ("messages", "prompt"),
        ("image.width", "size"),
        ("image", "image"),
    ],
)
def test_server_fields_become_openai_parameters(
    sdk: openai.OpenAI, backend: FakeBackend, where: str, param: str
) -> None:
    backend.refusal = f"[bad_request:{where}] no"
    with pytest.raises(openai.BadRequestError) as caught:
        edit(sdk, mask=half_mask())
    assert caught.value.param == param


@pytest.mark.parametrize(("able", "says"), [(["edit"], "these can: painter"), (["image"], "no model here can")])
def test_the_wrong_model_names_the_right_ones(
    sdk: openai.OpenAI, backend: FakeBackend, able: list[str], says: str
) -> None:
    backend.operations = {"painter": able}
    backend.refusal = "[bad_request:operation] unknown operation 'edit'; this pipeline has: chat"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=f"'fake' does not edit images; {says}") as caught:
            edit(sdk, model="fake", stream=stream)
        assert caught.value.param == "model"


def test_values_in_a_form_that_json_could_not_say_stay_text(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    edit(sdk, extra_body={"stages[words][a]": '"\\ud800"', "stages[words][b]": "NaN", "stages[words][c]": "1e9"})
    assert backend.seen[0].request.stages["words"] == {"a": '"\\ud800"', "b": "NaN", "c": 1e9}


def test_a_model_that_reads_no_images_is_refused_with_the_names_of_those_that_edit(
    sdk: openai.OpenAI, backend: FakeBackend
) -> None:
    backend.operations = {"painter": ["edit"]}
    backend.media = ("text",)
    with pytest.raises(openai.BadRequestError, match="'fake' does not edit images; these can: painter") as caught:
        edit(sdk, model="fake")
    assert caught.value.param == "model"
    assert not backend.seen
