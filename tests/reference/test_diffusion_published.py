# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image and Qwen-Image-Edit as published: real configurations on the meta device, and complete requests on small
checkpoints with the published files, keys and parameter names."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kit import published_image as published
from tests.kit.diffusers_edit import edit_with, load_stock
from tests.kit.tiny_edit import edit_run, photo
from tests.kit.tiny_image import finish, images_of
from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.generate import decode_request
from triton_omni.backends.core.ids import new_run_id
from triton_omni.backends.core.pipeline import EngineContext
from triton_omni.backends.deploy.load import load_deploy
from triton_omni.backends.diffusion.image_params import resolve
from triton_omni.backends.diffusion.options import read_options
from triton_omni.backends.pipelines import qwen_image
from triton_omni.backends.pipelines.qwen_image.pipeline import PIPELINE
from triton_omni.backends.pipelines.qwen_image_edit.pipeline import PIPELINE as EDITS
from triton_omni.backends.repository import deploy_files

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(280)

GPU_BYTES = 80 * 10**9
README = Path(qwen_image.__file__).with_name("README.md")


# --- real sizes, without weights -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def networks() -> dict[str, Any]:
    """The published configurations in diffusers' and transformers' own classes, on the meta device."""
    from triton_omni.backends.diffusion import upstream

    text = upstream.Qwen2_5_VLConfig.from_dict(published.TEXT_ENCODER)
    with torch.device("meta"):
        return {
            "transformer": upstream.QwenImageTransformer2DModel.from_config(published.TRANSFORMER).to(torch.bfloat16),
            "vae": upstream.AutoencoderKLQwenImage.from_config(published.VAE).to(torch.bfloat16),
            "text_encoder": upstream.Qwen2_5_VLForConditionalGeneration(text).to(torch.bfloat16),
        }


def nbytes(network: Any) -> int:
    return sum(p.nbytes for p in network.parameters())


def test_parameter_names_and_sizes_are_the_published_ones(networks: dict[str, Any]) -> None:
    transformer, text_encoder = networks["transformer"], networks["text_encoder"]
    assert {name for name, _ in transformer.named_parameters()} == published.transformer_names()
    assert nbytes(transformer) == published.TRANSFORMER_BYTES
    names = {re.sub(r"^model\.(language_model\.|(?=visual\.))", "", n) for n, _ in text_encoder.named_parameters()}
    assert {
        n if n.startswith(("visual.", "lm_head.")) else f"model.{n}" for n in names
    } == published.text_encoder_names()
    assert nbytes(text_encoder) == published.TEXT_ENCODER_BYTES


class ParametersUsed(torch.overrides.TorchFunctionMode):
    """Records which parameters take part in a computation."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nested = [v for a in (*args, *(kwargs or {}).values()) for v in (a if isinstance(a, list | tuple) else [a])]
        self.ids |= {id(v) for v in nested if isinstance(v, torch.nn.Parameter)}
        return func(*args, **(kwargs or {}))

    def unused(self, network: Any) -> set[str]:
        return {name for name, p in network.named_parameters() if id(p) not in self.ids}


@pytest.mark.parametrize("sources_at_zero", [False, True], ids=["", "zero_cond_t"])
def test_packed_step_of_a_megapixel_uses_every_parameter(networks: dict[str, Any], sources_at_zero: bool) -> None:
    """An edit and a text-to-image request share the step; the second kind of transformer is Qwen-Image-Edit-2511."""
    from triton_omni.backends.diffusion.packed import PackedForward, unsupported_reason

    transformer = networks["transformer"]
    transformer.register_to_config(zero_cond_t=sources_at_zero)
    assert unsupported_reason(transformer) == ""
    grid, width = (1, 64, 64), published.TRANSFORMER["joint_attention_dim"]

    def source(grids: tuple[tuple[int, int, int], ...], *text_tokens: int) -> Any:
        tokens = sum(map(prod, grids))
        return SimpleNamespace(
            n=1,
            grids=grids,
            branches=lambda: tuple(torch.empty(1, t, width, device="meta", dtype=torch.bfloat16) for t in text_tokens),
            timestep=lambda: torch.empty((), device="meta"),
            model_input=lambda: torch.empty(1, tokens, 64, device="meta", dtype=torch.bfloat16),
        )

    with ParametersUsed() as used, torch.inference_mode():
        edit, image = PackedForward(transformer, 1).predict([source((grid, grid), 1400, 1380), source((grid,), 20)])
    assert edit.negative is not None
    assert image.negative is None
    assert {tuple(t.shape) for t in (*edit, image.positive)} == {(1, 4096, 64)}
    assert used.unused(transformer) == set()


@pytest.mark.parametrize("pipeline", [PIPELINE, EDITS], ids=lambda p: p.name)
def test_deployed_default_request_fits_a_gpu_of_80_gb(
    networks: dict[str, Any], pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton_omni.backends.diffusion import memory
    from triton_omni.backends.diffusion.text import Prompt

    (file,) = deploy_files(pipeline.name)
    options = read_options(load_deploy(file, pipeline).stages["denoiser"].engine, "denoiser")
    free = GPU_BYTES - sum(map(nbytes, networks.values()))
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    budget = memory.ImageMemory(SimpleNamespace(**networks), options, torch.device("cuda"))
    prompts = [Prompt(tuple(range(2000)), 64, 1369)] * 2  # 1369: image tokens of a megapixel in the text encoder
    edit = pipeline is EDITS
    run = (
        edit_run("a", [photo(1024, 1024)])
        if edit
        else Run(b"", "", decode_request(b'{"operation":"image","input":"a"}'))
    )
    spec = resolve(run.request, "denoiser", options.limits, options.defaults)
    assert (spec.width, spec.height, spec.steps, spec.has_guidance) == (1024, 1024, 50, True)
    needs = budget.check(spec, prompts if edit else [Prompt(tuple(range(600)), 34)] * 2, str)
    assert needs.held + needs.peak < budget.limit_bytes < free


# --- small sizes, published files ----------------------------------------------------------------------------
@pytest.fixture(scope="module", params=[False, True], ids=["qwen_image", "qwen_image_edit"])
def is_edit(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, is_edit: bool) -> Path:
    """A models folder with the checkpoint that the deploy file names."""
    folder = tmp_path_factory.mktemp("published")
    published.save_checkpoint(folder / ("Qwen-Image-Edit" if is_edit else "Qwen-Image"), is_edit)
    return folder


def test_small_checkpoint_has_the_published_files_and_names(models: Path, is_edit: bool) -> None:
    (folder,) = models.iterdir()
    index = json.loads((folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == published.transformer_names(2)
    assert re.fullmatch(r"diffusion_pytorch_model-00001-of-\d{5}\.safetensors", min(index["weight_map"].values()))
    index = json.loads((folder / "text_encoder" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == published.text_encoder_names(2, 2)
    for name, values in (("transformer", published.TRANSFORMER), ("text_encoder", published.TEXT_ENCODER)):
        assert json.loads((folder / name / "config.json").read_text()).keys() == values.keys()
    assert (folder / "processor" / "preprocessor_config.json").exists() == is_edit
    assert not (folder / "tokenizer" / "tokenizer.json").exists()


def deployed_engine(pipeline: Any, models: Path, batching: str) -> Any:
    """The stage's engine as deployed, on the CPU."""
    (file,) = deploy_files(pipeline.name)
    options = {**load_deploy(file, pipeline).stages["denoiser"].engine, "batching": batching}
    return pipeline.stage("denoiser").engine(EngineContext(pipeline.name, "denoiser", options, "cpu", str(models)))


def example_request(models: Path, is_edit: bool) -> Run:
    """The complete request of the README; for an edit with a source image of a megapixel."""
    (example,) = re.findall(r"```json\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    request = decode_request(example.encode())
    if is_edit:
        return edit_run(request.input, [photo(1024, 1024)], seed=42, steps=2, true_cfg_scale=4.0, negative_prompt=" ")
    return Run(new_run_id(), "example", request, wanted=frozenset({"image"}))


@pytest.fixture(scope="module")
def stock_image(models: Path, is_edit: bool) -> np.ndarray:
    """The image that diffusers' pipeline class makes of the example request."""
    from triton_omni.backends.diffusion import upstream

    torch.set_num_threads(1)  # as the engine
    (folder,) = models.iterdir()
    name = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
    stock, run = load_stock(getattr(upstream, name), folder, torch.bfloat16), example_request(models, is_edit)
    if is_edit:
        return edit_with(stock, run, "pil")[0]
    made = stock(
        run.request.input,
        negative_prompt=" ",
        true_cfg_scale=4.0,
        width=1024,
        height=1024,
        num_inference_steps=50,
        generator=torch.Generator().manual_seed(42),
    )
    return np.asarray(made.images[0])


def test_complete_request_equals_diffusers(models: Path, is_edit: bool, stock_image: np.ndarray) -> None:
    """Seed 42 at 1024 x 1024 in bfloat16: as deployed (packed, 50 steps) up to rounding, and an edit bit for bit."""
    batching, largest, mean = ("seq", 0, 0.0) if is_edit else ("packed", 12, 0.5)
    pipeline = EDITS if is_edit else PIPELINE
    engine, run = deployed_engine(pipeline, models, batching), example_request(models, is_edit)
    assert engine.options.dtype == "bfloat16"
    engine.open(run)
    with ParametersUsed() as used:
        events = finish(engine)
    (image,) = images_of(events, run)
    assert image.shape == (1024, 1024, 3) and image.std() > 5
    assert events[-1].usage["steps"] == (2 if is_edit else 50)
    networks = engine.model.pipe
    assert used.unused(networks.transformer) == set()
    unused = {name.partition(".")[0] for name in used.unused(networks.text_encoder.model)}
    assert unused == (set() if is_edit else {"visual"})
    assert all(
        "time_conv" in n or (not is_edit and n.startswith(("encoder.", "quant"))) for n in used.unused(networks.vae)
    )
    difference = np.abs(image.astype(int) - stock_image.astype(int))
    assert difference.max() <= largest
    assert difference.mean() <= mean
