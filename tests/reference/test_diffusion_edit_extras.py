# SPDX-License-Identifier: Apache-2.0
"""Edits with LoRA, step cache and fast previews, and how long their preparation delays other runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.diffusers_edit import edit_with, load_stock, use_small_source_size
from tests.kit.tiny_edit import SOURCE_PIXELS, edit_run, hole, photo, save_tiny_edit
from tests.kit.tiny_image import engine_of, finish, image_run, images_of
from triton_omni.backends.core.engine import EngineOutput, Run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(200)

SMALL = {"source_pixels": SOURCE_PIXELS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_edit(tmp_path_factory.mktemp("edit") / "one")


@pytest.fixture(scope="module")
def several_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_edit(tmp_path_factory.mktemp("edit") / "several", several=True, sources_at_zero=True)


@pytest.fixture
def small_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_source_size(monkeypatch)


def generate(engine: Any, run: Run) -> np.ndarray:
    engine.open(run)
    return images_of(finish(engine), run)[0]


def max_difference(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def stock(folder: Path, mask: bool = False) -> Any:
    from triton_omni.backends.diffusion import upstream

    return load_stock(getattr(upstream, "QwenImageEditInpaintPipeline" if mask else "QwenImageEditPipeline"), folder)


def save_lora(folder: Path, home: Path) -> Path:
    """A random adapter of the transformer, written by peft and diffusers."""
    from peft import LoraConfig, get_peft_model_state_dict

    from triton_omni.backends.diffusion.upstream import QwenImageEditPipeline

    transformer = stock(folder).transformer
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "add_q_proj"]))
    generator = torch.Generator().manual_seed(7)
    for key, weight in transformer.named_parameters():
        if "lora_" in key:
            weight.data.normal_(0.0, 0.5, generator=generator)
    layers: Any = get_peft_model_state_dict(transformer)
    QwenImageEditPipeline.save_lora_weights(home, transformer_lora_layers=layers)
    return home


# --- what else a stage offers --------------------------------------------------------------------------------
@pytest.mark.usefixtures("small_stock")
@pytest.mark.parametrize(("batching", "most_levels"), [("seq", 0), ("packed", 1)])
@pytest.mark.parametrize("with_mask", [False, True])
def test_edit_with_a_lora_equals_diffusers(
    folder: Path, tmp_path: Path, batching: str, most_levels: int, with_mask: bool
) -> None:
    lora = save_lora(folder, tmp_path)
    engine = engine_of(folder, batching=batching, defaults=SMALL, loras={"ink": str(lora)})
    pipe = stock(folder, with_mask)
    pipe.load_lora_weights(lora, adapter_name="ink")
    asked: dict[str, Any] = {"steps": 4, "seed": 1, "negative_prompt": " ", "true_cfg_scale": 2.5}
    mask = hole(64, 64) if with_mask else None
    plain = generate(engine, edit_run("a red 7", [photo(64, 64, 3)], mask, **asked))
    for scale in (1.0, 0.5):
        pipe.set_adapters(["ink"], [scale])
        run = edit_run("a red 7", [photo(64, 64, 3)], mask, **asked, lora="ink", lora_scale=scale)
        (theirs,) = edit_with(pipe, run, "pil")
        assert max_difference(theirs, plain) > 2
        assert max_difference(generate(engine, run), theirs) <= most_levels


@pytest.mark.usefixtures("small_stock")
def test_edit_with_a_step_cache_equals_diffusers_and_does_not_affect_others(folder: Path) -> None:
    from triton_omni.backends.diffusion.upstream import FirstBlockCacheConfig

    engine = engine_of(folder, step_cache_threshold=0.5, defaults=SMALL)
    asked: dict[str, Any] = {"steps": 8, "seed": 1, "negative_prompt": " ", "true_cfg_scale": 2.5}
    exact = generate(engine, edit_run("two", [photo(64, 64, 3)], **asked))
    pipe = stock(folder)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    run = edit_run("two", [photo(64, 64, 3)], **asked, step_cache=True)
    (theirs,) = edit_with(pipe, run, "pil")
    neighbour = edit_run("two", [photo(64, 64, 3)], **asked)
    engine.open(neighbour)
    engine.open(run)
    events = finish(engine)
    assert max_difference(images_of(events, run)[0], theirs) <= 1
    assert max_difference(theirs, exact) > 0  # parts of steps were skipped
    assert np.array_equal(images_of(events, neighbour)[0], exact)


@pytest.mark.parametrize("with_mask", [False, True])
def test_fast_previews_of_an_edit_do_not_change_the_image(folder: Path, with_mask: bool) -> None:
    engine = engine_of(folder, defaults=SMALL)
    mask = hole(64, 64) if with_mask else None
    run = edit_run("a red 7", [photo(64, 64, 3)], mask, steps=6, seed=1, preview_every=2)
    engine.open(run)
    outputs = [e for e in finish(engine) if isinstance(e, EngineOutput)]
    assert [(e.piece.step, e.piece.preview) for e in outputs] == [(2, "fast"), (4, "fast"), (6, "")]
    assert {e.tensors[0].spec.shape for e in outputs} == {(128, 128, 3)}
    plain = generate(engine, edit_run("a red 7", [photo(64, 64, 3)], mask, steps=6, seed=1))
    assert np.array_equal(np.asarray(outputs[-1].tensors[0].data), plain)


# --- preparing -----------------------------------------------------------------------------------------------
def test_others_wait_for_at_most_one_encode_between_steps(several_folder: Path) -> None:
    engine = engine_of(several_folder, defaults=SMALL)
    steady = image_run("a red 1", width=64, height=64, steps=12, seed=1)
    engine.open(steady)
    engine.step()
    guided: dict[str, Any] = {"steps": 3, "seed": 2, "negative_prompt": " ", "true_cfg_scale": 2.0}
    edit = edit_run("two", [photo(64, 64, 1), photo(40, 90, 2)], **guided)
    alone = generate(
        engine_of(several_folder, defaults=SMALL), edit_run("two", [photo(64, 64, 1), photo(40, 90, 2)], **guided)
    )
    engine.open(edit)
    began = steady.state.step
    events: list[Any] = []
    while not edit.state.is_prepared:
        encoded, step = engine.model.encode_count, steady.state.step
        events += engine.step()
        assert engine.model.encode_count == encoded + 1
        assert steady.state.step == step + 1
    assert steady.state.step - began == 4  # both prompts with the images, and both images
    events += finish(engine)
    assert np.array_equal(images_of(events, edit)[0], alone)


def test_preparing_a_large_edit_does_not_delay_other_runs(folder: Path) -> None:
    engine = engine_of(folder, defaults=SMALL, step_overhead_tokens=40)
    steady = image_run("a red 1", width=64, height=64, steps=12, seed=1)
    engine.open(steady)
    engine.step()
    engine.open(edit_run("two", [photo(64, 64, 1)], steps=2, seed=2, n=4))
    for _ in range(2):
        step = steady.state.step
        engine.step()
        assert steady.state.step == step + 1
    finish(engine)


def test_equal_images_and_prompts_are_encoded_once(folder: Path) -> None:
    engine = engine_of(folder, defaults=SMALL)

    def encodes(prompt: str, seed: int, image: np.ndarray, mask: np.ndarray | None = None) -> int:
        before, run = engine.model.encode_count, edit_run(prompt, [image], mask, steps=2, seed=seed)
        image_drawn = generate(engine, run)
        fresh = engine_of(folder, defaults=SMALL, cache_bytes=0)
        assert np.array_equal(generate(fresh, edit_run(prompt, [image], mask, steps=2, seed=seed)), image_drawn)
        return engine.model.encode_count - before

    assert encodes("two", 1, photo(64, 64, 1)) == 2
    assert encodes("two", 2, photo(64, 64, 1)) == 0
    assert encodes("two", 3, photo(64, 64, 1), hole(64, 64)) == 0  # a mask draws from the same distribution
    assert encodes("three", 1, photo(64, 64, 1)) == 1
    assert encodes("two", 1, photo(64, 64, 2)) == 2
    assert encodes("two", 1, photo(64, 64, 1).reshape(32, 128, 3)) == 2  # the same bytes, another image


def test_encoding_cache_is_bounded_in_bytes(folder: Path) -> None:
    engine = engine_of(folder, defaults=SMALL, cache_bytes=100_000)
    for seed in range(8):
        generate(engine, edit_run("two", [photo(64, 64, seed)], steps=2, seed=1))
        assert 0 < engine.model.cache.bytes <= 100_000
    assert engine.model.encode_count == 16
