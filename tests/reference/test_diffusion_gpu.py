# SPDX-License-Identifier: Apache-2.0
"""The diffusion engine on a GPU: images equal the CPU's up to rounding, alone and batched."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kit.gpu_devices import HAS_GPU, NEEDS_GPU
from tests.kit.tiny_image import engine_of, finish, image_run, images_of, save_tiny_image

torch = pytest.importorskip("torch")
pytestmark = [*NEEDS_GPU, pytest.mark.timeout(300)]

COARSE = 24  # the same in bfloat16, whose rounding is 2 ** 16 times as large; an error in what is exchanged is larger
ROUNDING = 3  # of 255: float32 on both, but sums in another order, over up to nine steps


def runs():
    return [
        image_run("a red handwritten 7", width=64, height=64, steps=6, seed=1),
        image_run("3", negative_prompt=" ", true_cfg_scale=2.5, width=64, height=96, steps=9, seed=2, n=2),
        image_run("two", width=32, height=64, steps=4, seed=3),
    ]


@pytest.fixture(autouse=True)
def full_float32(monkeypatch):
    """cuDNN's convolutions use TF32 by default, whose 10-bit mantissa is no rounding of float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture
def gpus(monkeypatch):
    """Sets the number of GPUs that the instance reports."""
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def generate(engine, together):
    made = runs()
    events = []
    for run in made:
        engine.open(run)
        if not together:
            events += finish(engine)
    events += finish(engine)
    engine.close()
    return [image for run in made for image in images_of(events, run)]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_images_equal_the_cpu_up_to_rounding(tmp_path, gpus, together):
    folder = save_tiny_image(tmp_path / "tiny")
    gpus(1)
    here, there = generate(engine_of(folder), together), generate(engine_of(folder, "cuda"), together)
    assert len(here) == len(there) == 4
    for cpu, gpu in zip(here, there, strict=True):
        assert np.abs(cpu.astype(int) - gpu.astype(int)).max() <= ROUNDING


@pytest.mark.skipif(HAS_GPU and torch.cuda.device_count() < 2, reason="ranks on GPUs: fewer than two CUDA devices")
@pytest.mark.parametrize(
    "options",
    [
        {"parallel": {"cfg": 2}},
        {"parallel": {"cfg": 2}, "batching": "seq"},
        {"parallel": {"context": 2}, "batching": "seq"},
        {"parallel": {"context": 2, "kind": "ring"}, "batching": "seq", "dtype": "bfloat16"},
    ],
    ids=["cfg packed", "cfg seq", "ulysses", "ring"],
)
def test_two_ranks_equal_one_up_to_rounding(tmp_path, gpus, options):
    folder = save_tiny_image(tmp_path / "tiny")
    alone = {name: value for name, value in options.items() if name != "parallel"}
    gpus(1)
    one = generate(engine_of(folder, "cuda", **alone), True)
    gpus(2)
    two = generate(engine_of(folder, "cuda", **options), True)
    for theirs, ours in zip(one, two, strict=True):
        assert np.abs(theirs.astype(int) - ours.astype(int)).max() <= (ROUNDING if "dtype" not in options else COARSE)
