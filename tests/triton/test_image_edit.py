# SPDX-License-Identifier: Apache-2.0
"""Edits through the real openai SDK, the proxy and a real server with a tiny checkpoint, beside the embedded model."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.utils.shared_memory as shm
import yaml
from PIL import Image

from tests.kit.proxy_server import proxy_process
from tests.kit.server_calls import generate, health, idle, wait_until_idle
from tests.kit.tiny_edit import SOURCE_PIXELS, edit_run, hole, photo
from tests.kit.triton_server import REPO, RunningServer, running_server, wait_for
from triton_omni.backends.wire import encode_request

pytestmark = [pytest.mark.triton, pytest.mark.models, pytest.mark.timeout(600)]

MODEL = "qwen_image_edit"
SMALL = {"source_pixels": SOURCE_PIXELS}
OPTIONS: dict[str, Any] = {"steps": 5, "seed": 3, "true_cfg_scale": 2.0, "negative_prompt": " "}
EXTRA = {("num_inference_steps" if k == "steps" else k): v for k, v in OPTIONS.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("diffusers", reason="needs the engine environment (make setup)")
    from tests.kit.tiny_edit import save_tiny_edit

    return save_tiny_edit(tmp_path_factory.mktemp("edit") / "tiny")


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("repository")
    engine = {"model": str(checkpoint), "defaults": SMALL, "step_overhead_tokens": 100_000}
    deploy = {"pipeline": MODEL, "stages": {"denoiser": {"device": "cpu", "engine": engine}}}
    (folder / "deploy.yaml").write_text(yaml.safe_dump(deploy), encoding="utf-8")
    command = [sys.executable, "-m", "triton_omni.cli", "repository", "--pipeline", MODEL]
    command += ["--deploy", str(folder / "deploy.yaml"), "--out", str(folder)]
    subprocess.run(command, check=True, timeout=60)
    with running_server([folder / MODEL, REPO / "model_repository" / "image"], timeout_s=300) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with proxy_process("--triton", server.grpc) as proxy, proxy.sdk(timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, np.ndarray]:
    """What the readable engine draws here; tests/reference compares that one with diffusers."""
    from tests.kit.tiny_image import engine_of, finish, images_of

    engine = engine_of(checkpoint, batching="seq", defaults=SMALL)
    found: dict[str, np.ndarray] = {}
    for name, mask in (("whole", None), ("masked", hole(150, 60))):
        run = edit_run("a red 7", [photo(150, 60)], mask, **OPTIONS)
        engine.open(run)
        (found[name],) = images_of(finish(engine), run)
    return found


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def mask_file() -> bytes:
    """The hole as OpenAI has it: transparent where the image may change."""
    return png(np.dstack([np.zeros((60, 150, 3), np.uint8), 255 - hole(150, 60)]))


def pixels(b64: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64)))).astype(int)


def edit(sdk: openai.OpenAI, **more: Any) -> Any:
    given = {"model": MODEL, "image": png(photo(150, 60)), "prompt": "a red 7", "extra_body": EXTRA}
    return sdk.images.edit(**{**given, **more})


@pytest.mark.parametrize("kind", ["whole", "masked"])
def test_an_edit_is_what_the_engine_draws(sdk: openai.OpenAI, expected: dict[str, np.ndarray], kind: str) -> None:
    answer = edit(sdk, **({"mask": mask_file()} if kind == "masked" else {}))
    drawn = pixels(answer.data[0].b64_json)
    assert drawn.shape == expected[kind].shape
    assert int(np.abs(drawn - expected[kind]).max()) <= 1
    assert answer.usage.input_tokens_details.image_tokens > 0


def test_previews_and_two_images_in_a_stream(sdk: openai.OpenAI, expected: dict[str, np.ndarray]) -> None:
    events = list(edit(sdk, n=2, stream=True, partial_images=1))
    assert {e.type for e in events[:-2]} == {"image_edit.partial_image"}
    assert [e.type for e in events[-2:]] == ["image_edit.completed"] * 2
    first, second = (pixels(e.b64_json) for e in events[-2:])
    assert int(np.abs(first - expected["whole"]).max()) <= 1
    assert np.abs(first - second).max() > 1


def test_the_same_model_draws_from_text(sdk: openai.OpenAI) -> None:
    answer = sdk.images.generate(model=MODEL, prompt="a red 7", size="64x96", extra_body=EXTRA)
    assert pixels(answer.data[0].b64_json).shape == (96, 64, 3)


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"model": "image"}, "model", f"does not edit images; these can: {MODEL}"),
        ({"image": [png(photo(64, 64))] * 2}, "image", "takes at most 1 image"),
        ({"image": png(photo(900, 100))}, "image", "8 times"),
        ({"mask": mask_file(), "size": "64x64"}, "size", "with a mask"),
        ({"size": "70x64"}, "size", "multiple of 16"),
        ({"prompt": "red " * 2000}, "prompt", "must be at most 512 tokens"),
    ],
)
def test_what_cannot_be_edited_names_the_parameter(
    sdk: openai.OpenAI, server: RunningServer, more: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        edit(sdk, **more)
    assert caught.value.param == param
    assert idle(server, MODEL)


def test_pixels_may_lie_in_shared_memory(server: RunningServer, expected: dict[str, np.ndarray]) -> None:
    run = edit_run("a red 7", [photo(150, 60)], **OPTIONS)
    pixels = photo(150, 60).reshape(-1)
    region = shm.create_shared_memory_region("edit", "/omni_test_edit", pixels.nbytes)
    client = grpcclient.InferenceServerClient(server.grpc)
    try:
        shm.set_shared_memory_region(region, [pixels])
        client.register_system_shared_memory("edit", "/omni_test_edit", pixels.nbytes)
        request = grpcclient.InferInput("request", [1], "BYTES")
        request.set_data_from_numpy(np.array([encode_request(run.request)], object))
        stream = grpcclient.InferInput("stream", [1], "BOOL")
        stream.set_data_from_numpy(np.array([False]))
        image = grpcclient.InferInput("image", list(pixels.shape), "UINT8")
        image.set_shared_memory("edit", pixels.nbytes)
        answers: list[Any] = []
        client.start_stream(lambda result, error: answers.append(error or result))
        client.async_stream_infer(MODEL, [request, stream, image])
        wait_for(lambda: bool(answers), 120, "the image")
        drawn = answers[0].as_numpy("image").astype(int)
        assert int(np.abs(drawn.reshape(expected["whole"].shape) - expected["whole"]).max()) <= 1
    finally:
        client.stop_stream()
        client.unregister_system_shared_memory("edit")
        client.close()
        shm.destroy_shared_memory_region(region)


def test_an_edit_without_its_pixels_is_refused(server: RunningServer) -> None:
    request = encode_request(edit_run("a red 7", [photo(150, 60)], **OPTIONS).request).decode()
    status, answer = generate(server, MODEL, request=request)
    assert status == 400 and "needs the input tensor 'image'" in answer["error"]
    bare = json.dumps({"operation": "edit", "input": "a red 7"})
    status, answer = generate(server, MODEL, request=bare)
    assert status == 400 and "[bad_request:messages]" in answer["error"]
    assert health(server, MODEL)["ready"]


def test_a_client_that_leaves_frees_its_place(sdk: openai.OpenAI, server: RunningServer) -> None:
    slow = {**EXTRA, "num_inference_steps": 200}
    stream = edit(sdk, stream=True, partial_images=3, extra_body=slow)
    assert next(iter(stream)).type == "image_edit.partial_image"
    stream.close()
    wait_until_idle(server, MODEL, timeout_s=20.0)
