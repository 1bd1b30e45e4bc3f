# SPDX-License-Identifier: Apache-2.0
"""/v1/images/generations through the real SDK."""

from __future__ import annotations

import base64
import io
import threading
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.kit.fake_backend import FakeBackend
from triton_omni.backends.core.generate import ImageParams
from triton_omni.openai.endpoints.image_request import ImageCall


def draw(sdk: openai.OpenAI, **more: Any) -> Any:
    return sdk.images.generate(**{"model": "painter", "prompt": "a fox", **more})


def image(b64: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def test_images_in_order_and_as_png(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    answer = draw(
        sdk, n=2, size="32x16", quality="high", response_format="b64_json",
        extra_body={"num_inference_steps": 5, "guidance_scale": 2.5, "true_cfg_scale": 4, "negative_prompt": "no",
                    "seed": 7},
    )  # fmt: skip
    images = [image(d.b64_json) for d in answer.data]
    assert [p.format for p in images] == ["PNG", "PNG"]
    assert [np.asarray(p).shape for p in images] == [(16, 32, 3)] * 2
    assert [int(np.asarray(p)[0, 0, 0]) for p in images] == [200, 201]
    assert (answer.size, answer.output_format, answer.background, answer.quality) == ("32x16", "png", "opaque", "high")
    assert answer.usage.to_dict() == {
        "input_tokens": 4, "input_tokens_details": {"text_tokens": 4, "image_tokens": 0},
        "output_tokens": 8, "output_tokens_details": {"text_tokens": 0, "image_tokens": 8}, "total_tokens": 12,
    }  # fmt: skip
    request = backend.seen[0].request
    assert (request.operation, request.input) == ("image", "a fox")
    assert request.image == ImageParams(
        width=32, height=16, n=2, steps=5, guidance_scale=2.5, true_cfg_scale=4.0, negative_prompt="no", seed=7
    )


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_other_formats(sdk: openai.OpenAI, kind: str) -> None:
    answer = draw(sdk, output_format=kind, output_compression=50, size="auto")
    assert image(answer.data[0].b64_json).format == kind.upper()


def test_url_is_a_data_url(sdk: openai.OpenAI) -> None:
    url = draw(sdk, response_format="url").data[0].url
    assert url.startswith("data:image/png;base64,")
    assert image(url.partition(",")[2]).size == (16, 8)


def test_previews_then_the_image(sdk: openai.OpenAI) -> None:
    events = list(draw(sdk, stream=True, partial_images=2))
    assert [e.type for e in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [e.partial_image_index for e in events[:2]] == [0, 1]
    assert [int(np.asarray(image(e.b64_json))[0, 0, 0]) for e in events] == [0, 1, 200]
    assert events[2].usage.total_tokens == 12 and events[2].size == "16x8"


def test_fast_previews_then_the_image(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    events = list(draw(sdk, stream=True, extra_body={"preview_every": 2, "num_inference_steps": 7}))
    assert [e.type for e in events] == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert [e.partial_image_index for e in events[:3]] == [0, 1, 2]
    assert backend.seen[0].request.image == ImageParams(preview_every=2, steps=7)


@pytest.mark.parametrize("lora", ["ink", {"name": "ink", "scale": 0.5}])
def test_a_lora_and_the_step_cache(sdk: openai.OpenAI, backend: FakeBackend, lora: Any) -> None:
    scale = {"lora_scale": 0.5} if lora == "ink" else {}
    draw(sdk, extra_body={"lora": lora, "step_cache": True, **scale})
    assert backend.seen[0].request.image == ImageParams(lora="ink", lora_scale=0.5, step_cache=True)


@pytest.mark.parametrize(("asked", "said"), [("auto", None), ("standard", "medium"), ("hd", "high"), ("max", "max")])
def test_what_is_checked_and_what_is_ignored_changes_nothing(
    sdk: openai.OpenAI, backend: FakeBackend, asked: Any, said: str | None
) -> None:
    answer = draw(
        sdk, size="auto", quality=asked, style="vivid", background="opaque", moderation="low", user="me",
        safety_identifier="x", output_format="png", output_compression=100, response_format="b64_json", n=1,
        extra_body={"seed": None, "partial_images": 0, "preview_every": 0, "step_cache": False},
    )  # fmt: skip
    assert answer.quality == said
    assert backend.seen[0].request.image == ImageParams()


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"stream": True, "response_format": "url"}, "response_format", "unsupported_value"),
        ({"response_format": "file"}, "response_format", "unsupported_value"),
        ({"style": "flat"}, "style", "unsupported_value"),
        ({"extra_body": {"svg": {}}}, "svg", "unsupported_value"),
        ({"extra_body": {"frame_count": 2}}, "frame_count", "unsupported_value"),
        ({"extra_body": {"preview_every": 2}}, "preview_every", "invalid_value"),
        ({"extra_body": {"lora": {"name": "a", "path": "/etc"}}}, "lora.path", "unsupported_value"),
        ({"extra_body": {"lora": {"scale": 1}}}, "lora.name", "missing_required_parameter"),
        ({"extra_body": {"lora": 3}}, "lora", "invalid_type"),
        ({"extra_body": {"step_cache": 1}}, "step_cache", "invalid_type"),
        ({"extra_body": {"cache_backend": "tea_cache"}}, "cache_backend", "unsupported_value"),
        ({"extra_body": {"vae_use_tiling": True}}, "vae_use_tiling", "unsupported_value"),
        ({"extra_body": {"true_cfg_scale": 101}}, "true_cfg_scale", "invalid_value"),
        ({"extra_body": {"guidance_scale": "4"}}, "guidance_scale", "invalid_type"),
        ({"extra_body": {"num_inference_steps": 0}}, "num_inference_steps", "invalid_value"),
        ({"extra_body": {"negative_prompt": "x" * 32_001}}, "negative_prompt", "invalid_value"),
        ({"prompt": " "}, "prompt", "missing_required_parameter"),
        ({"n": 11}, "n", "invalid_value"),
        ({"size": "big"}, "size", "invalid_value"),
        ({"output_format": "svg"}, "output_format", "unsupported_value"),
        ({"output_format": "bmp"}, "output_format", "unsupported_value"),
        ({"background": "transparent"}, "background", "unsupported_value"),
        ({"output_compression": 50}, "output_compression", "invalid_value"),
        ({"partial_images": 2}, "partial_images", "invalid_value"),
        ({"partial_images": 4, "stream": True}, "partial_images", "invalid_value"),
        ({"quality": "best"}, "quality", "unsupported_value"),
        ({"extra_body": {"seed": -2}}, "seed", "invalid_value"),
        ({"extra_body": {"steps": 3}}, "steps", "unknown_parameter"),
    ],
)
def test_bad_input_names_the_parameter(sdk: openai.OpenAI, more: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        draw(sdk, **more)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_server_fields_become_openai_parameters(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    for where, param in [("image.lora", "lora"), ("image.preview_every", "preview_every"),
                         ("image.step_cache", "step_cache"),
                         ("image.width", "size"), ("image.steps", "num_inference_steps"),
                         ("input", "prompt")]:  # fmt: skip
        backend.refusal = f"[bad_request:{where}] no"
        with pytest.raises(openai.BadRequestError) as caught:
            draw(sdk)
        assert caught.value.param == param


@pytest.mark.parametrize("is_stream", [True, False])
def test_images_are_encoded_beside_the_event_loop(
    sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    encode, threads = ImageCall.encode, list[str]()

    def noted(call: ImageCall, pixels: np.ndarray) -> str:
        threads.append(threading.current_thread().name)
        return encode(call, pixels)

    monkeypatch.setattr(ImageCall, "encode", noted)
    answer = draw(sdk, n=2, stream=is_stream)
    if is_stream:
        assert [image(event.b64_json).format for event in answer] == ["PNG", "PNG"]
    assert len(threads) == 2 and all(name.startswith("answers") for name in threads)


def test_failure_in_mid_stream_raises_in_the_sdk(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.fail_after = 1
    seen: list[str] = []
    with pytest.raises(openai.APIError, match="out of luck"):
        seen += [event.type for event in draw(sdk, stream=True, partial_images=2)]
