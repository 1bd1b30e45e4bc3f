# SPDX-License-Identifier: Apache-2.0
"""Optional features of the diffusion engine: LoRA, step cache, compiled blocks, fast previews."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.tiny_image import ends, engine_of, finish, image_run, images_of, save_tiny_image
from triton_omni.backends.core.engine import EngineFailed, EngineOutput, OptionsError
from triton_omni.backends.core.errors import BadRequest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(200)

SIZE = {"width": 64, "height": 64}
DIGITS = Path(__file__).parents[2] / "backends" / "pipelines" / "image" / "digits"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_image(tmp_path_factory.mktemp("image") / "tiny")


def stock(folder: Path) -> Any:
    from triton_omni.backends.diffusion.upstream import QwenImagePipeline, be_quiet

    be_quiet()
    pipe = QwenImagePipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate_with(pipe: Any, prompt: str, steps: int, seed: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    answer = pipe(prompt, width=64, height=64, num_inference_steps=steps, generator=generator, output_type="pil")
    return np.asarray(answer.images[0])


def generate(engine: Any, prompt: str, **options: Any) -> np.ndarray:
    run = image_run(prompt, **SIZE, **options)
    engine.open(run)
    return images_of(finish(engine), run)[0]


def max_difference(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


# --- LoRA ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def loras(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two random adapters, written by peft and diffusers."""
    from peft import LoraConfig, get_peft_model_state_dict

    from triton_omni.backends.diffusion.upstream import QwenImagePipeline

    found: dict[str, str] = {}
    for seed, name in enumerate(("ink", "chalk")):
        transformer = stock(folder).transformer
        transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        generator = torch.Generator().manual_seed(seed)
        for key, weight in transformer.named_parameters():
            if "lora_" in key:
                weight.data.normal_(0.0, 0.5, generator=generator)
        home = tmp_path_factory.mktemp(name)
        QwenImagePipeline.save_lora_weights(home, transformer_lora_layers=get_peft_model_state_dict(transformer))
        found[name] = str(home)
    return found


@pytest.mark.parametrize(("batching", "most_levels"), [("seq", 0), ("packed", 1)])
def test_images_with_a_lora_equal_diffusers(folder: Path, loras: dict, batching: str, most_levels: int) -> None:
    engine = engine_of(folder, batching=batching, loras=loras)
    pipe = stock(folder)
    plain = generate_with(pipe, "two", 5, 3)
    pipe.load_lora_weights(loras["ink"], adapter_name="ink")
    for scale in (1.0, 0.5):
        pipe.set_adapters(["ink"], [scale])
        theirs = generate_with(pipe, "two", 5, 3)
        assert max_difference(theirs, plain) > 2
        ours = generate(engine, "two", steps=5, seed=3, lora="ink", lora_scale=scale)
        assert max_difference(ours, theirs) <= most_levels
    assert max_difference(generate(engine, "two", steps=5, seed=3), plain) <= most_levels


def test_runs_with_different_loras_are_not_batched(folder: Path, loras: dict) -> None:
    engine = engine_of(folder, loras=loras)
    asked = [{"lora": "ink"}, {"lora": "chalk"}, {"lora": "ink", "lora_scale": 0.5}, {}, {"lora": "ink"}]
    alone = [generate(engine, "two", steps=6, seed=i, **one) for i, one in enumerate(asked)]
    runs = [image_run("two", **SIZE, steps=6, seed=i, **one) for i, one in enumerate(asked)]
    before = engine.forwards
    for run in runs:
        engine.open(run)
    events = finish(engine)
    for run, image in zip(runs, alone, strict=True):
        assert np.array_equal(images_of(events, run)[0], image)
    assert engine.forwards - before == 4 * 6  # the two with the same adapter share
    loras_used = {e.run.id: e.piece.lora for e in events if isinstance(e, EngineOutput)}
    assert [loras_used[run.id] for run in runs] == ["ink", "chalk", "ink", "", "ink"]


def test_default_lora_can_be_disabled_by_the_request(folder: Path, loras: dict) -> None:
    engine = engine_of(folder, loras=loras, defaults={"lora": "ink"})
    default, named = generate(engine, "3", steps=4, seed=1), generate(engine, "3", steps=4, seed=1, lora="ink")
    assert np.array_equal(default, named)
    plain = generate(engine_of(folder), "3", steps=4, seed=1)
    assert np.array_equal(generate(engine, "3", steps=4, seed=1, lora=""), plain)


def test_unknown_loras_are_named(folder: Path, loras: dict, tmp_path: Path) -> None:
    engine = engine_of(folder, loras=loras)
    with pytest.raises(BadRequest, match=r"unknown LoRA 'inc'; this stage has: ink, chalk") as caught:
        engine.open(image_run("3", **SIZE, steps=4, lora="inc"))
    assert caught.value.where == "stages.denoiser.lora" and not engine.has_work
    with pytest.raises(BadRequest, match="needs a LoRA") as caught:
        engine.open(image_run("3", **SIZE, steps=4, lora_scale=0.5))
    assert caught.value.where == "stages.denoiser.lora_scale" and not engine.has_work
    with pytest.raises(OptionsError, match=r"loras: 'ink': .*nowhere does not exist"):
        engine_of(folder, loras={"ink": str(tmp_path / "nowhere")})
    with pytest.raises(OptionsError, match="loras: 'ink'"):
        engine_of(folder, loras={"ink": str(tmp_path)})  # an empty folder


# --- step cache ----------------------------------------------------------------------------------------------
def test_step_cache_state_belongs_to_its_run(folder: Path) -> None:
    from triton_omni.backends.diffusion.upstream import FirstBlockCacheConfig

    engine = engine_of(folder, step_cache_threshold=0.5)
    cached = {"steps": 8, "seed": 1, "step_cache": True}
    pipe = stock(folder)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    theirs = generate_with(pipe, "two", 8, 1)
    alone = generate(engine, "two", **cached)
    assert max_difference(alone, theirs) <= 1
    exact = generate(engine, "two", steps=8, seed=1)
    assert max_difference(alone, exact) > 0  # parts of steps were skipped
    assert np.array_equal(exact, generate(engine_of(folder), "two", steps=8, seed=1))
    neighbours = [image_run("a 7", **SIZE, steps=8, seed=i, step_cache=i == 2) for i in range(3)]
    run, plain = image_run("two", **SIZE, **cached), image_run("two", **SIZE, steps=8, seed=1)
    for one in (*neighbours, run, plain):
        engine.open(one)
    while run.state.step < 4:
        engine.step()
    engine.stop(neighbours[2])
    events = finish(engine)
    assert np.array_equal(images_of(events, run)[0], alone)
    assert np.array_equal(images_of(events, plain)[0], exact)
    assert not engine.model.step_cached.states


def test_step_cache_is_refused_unless_deployed(folder: Path) -> None:
    with pytest.raises(BadRequest, match="no step cache") as caught:
        engine_of(folder).open(image_run("3", **SIZE, steps=4, step_cache=True))
    assert caught.value.where == "stages.denoiser.step_cache"


# --- where weights are, and compiled ---------------------------------------------------------------------------
@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_offload_is_refused_on_a_cpu(folder: Path, offload: str) -> None:
    with pytest.raises(OptionsError, match=f"offload: {offload}.*on the CPU"):
        engine_of(folder, offload=offload, batching="seq")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_compiled_blocks_give_equal_images(folder: Path) -> None:
    plain, compiled = engine_of(folder, batching="seq"), engine_of(folder, batching="seq", compile=True)
    assert max_difference(generate(plain, "two", steps=4, seed=1), generate(compiled, "two", steps=4, seed=1)) <= 1


# --- fast previews -------------------------------------------------------------------------------------------
def test_fast_previews_have_the_requested_rate_and_resemble_the_image() -> None:
    engine = engine_of(DIGITS)
    options = {**SIZE, "steps": 12, "seed": 2, "true_cfg_scale": 2.5, "negative_prompt": " "}
    run = image_run("a red 7 on a yellow background", **options, preview_every=2)
    engine.open(run)
    outputs = [e for e in finish(engine) if isinstance(e, EngineOutput)]
    assert [e.piece.step for e in outputs] == [2, 4, 6, 8, 10, 12]
    assert [e.piece.partial_image_index for e in outputs] == [0, 1, 2, 3, 4, None]
    assert [e.piece.preview for e in outputs] == ["fast"] * 5 + [""]
    final = np.asarray(outputs[-1].tensors[0].data).astype(int)
    last = np.asarray(outputs[-2].tensors[0].data).astype(int)
    assert last.shape == final.shape
    likeness = np.corrcoef(last.ravel(), final.ravel())[0, 1]
    assert likeness > 0.7, likeness
    plain = image_run("a red 7 on a yellow background", **options)
    engine.open(plain)
    assert np.array_equal(images_of(finish(engine), plain)[0], final.astype(np.uint8))


def test_exact_and_fast_previews_are_exclusive(folder: Path) -> None:
    with pytest.raises(BadRequest, match="either") as caught:
        engine_of(folder).open(image_run("3", **SIZE, steps=4, partial_images=1, preview_every=1))
    assert caught.value.where == "stages.denoiser.preview_every"


def test_failed_fast_preview_fails_its_own_run_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.model, "preview", fail)
    run, other = (image_run("3", **SIZE, steps=4, seed=1, **more) for more in ({"preview_every": 2}, {}))
    engine.open(run)
    engine.open(other)
    events = finish(engine)
    (end,) = ends(events, run)
    assert isinstance(end, EngineFailed) and end.error.message == "step 2 failed: out of memory"
    assert len(images_of(events, other)) == 1 and not images_of(events, run)
