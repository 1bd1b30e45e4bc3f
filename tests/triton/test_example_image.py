# SPDX-License-Identifier: Apache-2.0
"""The example image of vLLM-Omni (1024 x 1024, 50 steps, seed 42) end to end on a small checkpoint of published shape.

The image itself is compared with diffusers' in tests/reference/test_diffusion_published.py.
"""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import yaml
from PIL import Image

from tests.kit.proxy_server import proxy_process
from tests.kit.server_calls import idle
from tests.kit.triton_server import REPO, running_server

pytestmark = [pytest.mark.triton, pytest.mark.timeout(280)]

MODEL = "qwen_image"
PACKAGE = REPO / "backends" / "pipelines" / MODEL


def test_the_images_api_and_triton_draw_the_same_example(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="needs the engine environment (make setup)")
    from tests.kit import published_image

    published_image.save_checkpoint(tmp_path / "Qwen-Image", False)
    deploy = yaml.safe_load((PACKAGE / "deploy.yaml").read_text())
    del deploy["stages"]["denoiser"]["gpus"]
    deploy["stages"]["denoiser"]["device"] = "cpu"
    deploy["stages"]["denoiser"]["engine"]["model"] = str(tmp_path / "Qwen-Image")
    (tmp_path / "deploy.yaml").write_text(yaml.safe_dump(deploy))
    command = [sys.executable, "-m", "triton_omni.cli", "repository", "--pipeline", MODEL]
    command += ["--deploy", str(tmp_path / "deploy.yaml"), "--out", str(tmp_path / "repository")]
    subprocess.run(command, check=True, timeout=60)
    with running_server([tmp_path / "repository" / MODEL], timeout_s=200) as server:
        with proxy_process("--triton", server.grpc) as proxy, proxy.sdk(timeout=120) as sdk:
            answer = sdk.images.generate(
                model=MODEL, prompt="A lighthouse at dusk, oil painting", size="1024x1024",
                extra_body={"num_inference_steps": 50, "true_cfg_scale": 4.0, "negative_prompt": " ", "seed": 42},
            )  # fmt: skip
        assert answer.data is not None and answer.data[0].b64_json is not None
        by_api = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))))
        assert by_api.shape == (1024, 1024, 3)
        assert by_api.std() > 5, "an image, not one colour"
        event, by_triton = over_grpc(server.grpc, example())
        assert (event["piece"]["seed"], event["piece"]["steps"], event["piece"]["cfg_applied"]) == (42, 50, True)
        np.testing.assert_array_equal(by_api, by_triton)
        assert idle(server, MODEL)


def example() -> bytes:
    """The complete request of the pipeline's README."""
    (request,) = re.findall(r"```json\n(.*?)```", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return json.dumps(json.loads(request) | {"stream": False}).encode()


def over_grpc(url: str, request: bytes) -> tuple[dict, np.ndarray]:
    """The one response of a collected request: its end, and the image."""
    answers = []
    tensor = grpcclient.InferInput("request", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([request], object))
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.append((result, error)))
        client.async_stream_infer(MODEL, [tensor])
        client.stop_stream()  # waits for the last response
    ((result, error),) = answers
    assert error is None, error
    event = json.loads(result.as_numpy("event").reshape(-1)[0])
    return {"piece": event["joined"]["image"]}, result.as_numpy("image")
