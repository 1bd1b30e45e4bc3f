# SPDX-License-Identifier: Apache-2.0
"""qwen3_omni's tiny checkpoint on a GPU inside a real server: the whole chain behind the proxy.

Not run on a GPU yet. `TRITON_OMNI_TEST_DEVICE=cpu` runs the same on a CPU.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.kit.gpu_devices import BUILD, HAS_GPU
from tests.kit.omni_chats import CHATS, FRAMES, references
from tests.kit.triton_server import RunningServer, running_server
from triton_omni.backends.repository import write

DEVICE = os.environ.get("TRITON_OMNI_TEST_DEVICE", "cuda")
IS_HERE = DEVICE == BUILD and (DEVICE == "cpu" or HAS_GPU)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.triton,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_HERE, reason=f"no CUDA device, or vLLM is not the build for {DEVICE}"),
]
CLOSE = 1e-3
"""float32 on another device: sums in another order. A wrong code changes samples by more (test_omni.py)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.kit.tiny_omni import tiny_omni

    return tiny_omni(tmp_path_factory.mktemp("tiny_omni"))


@pytest.fixture(scope="module")
def spoken(folder: Path) -> Any:
    """What transformers makes of the first chat."""
    from tests.kit.tiny_omni import Reference

    return references(Reference(folder))[0]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("omni")
    common = {"model": str(folder), "dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
    engines: dict[str, dict[str, Any]] = {
        "thinker": common | {"max_model_len": 512},
        "talker": common | {"max_model_len": 512, "sampling": {"temperature": 0.0, "max_tokens": FRAMES}},
        "code2wav": {"model": str(folder)} | ({"cuda_graph_windows": [1, 4]} if DEVICE == "cuda" else {}),
    }
    gpus = {"gpus": [0]} if DEVICE == "cuda" else {}
    stages = {name: {"device": DEVICE, "engine": engine} | gpus for name, engine in engines.items()}
    file = out / "deploy.yaml"
    file.write_text(yaml.safe_dump({"pipeline": "qwen3_omni", "stages": stages}), encoding="utf-8")
    write(out, file, DEVICE)  # pyright: ignore[reportArgumentType]
    kinds = [config.read_text() for config in out.rglob("config.pbtxt")]
    assert sum("KIND_GPU" in kind for kind in kinds) == (3 if DEVICE == "cuda" else 0)
    with running_server([out / "qwen3_omni"], supervised=True, proxy=True, timeout_s=600) as running:
        yield running


def test_the_proxy_speaks_as_transformers_does(server: RunningServer, spoken: Any) -> None:
    from openai import OpenAI

    said, tokens = CHATS[0]
    messages: Any = [{"role": role, "content": text} for role, text in said]
    answer = OpenAI(base_url=server.openai, api_key="none", timeout=240, max_retries=0).chat.completions.create(
        model="qwen3_omni",
        messages=messages,
        modalities=["text", "audio"],
        audio={"voice": "Ethan", "format": "pcm16"},
        max_tokens=tokens,
        temperature=0,
    )
    audio = answer.choices[0].message.audio
    assert audio is not None
    samples = np.frombuffer(base64.b64decode(audio.data), np.int16) / 32767
    assert samples.shape == spoken.wave.shape and np.abs(samples - spoken.wave).max() < CLOSE
