# SPDX-License-Identifier: Apache-2.0
"""Edits beside what else a stage offers: LoRA, step cache, fast previews; and what their preparation costs others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.diffusers_edit import bring_to_source_pixels, edited_by, stock_of
from tests.kit.tiny_edit import SOURCE_PIXELS, edit_run, hole, photo, save_tiny_edit
from tests.kit.tiny_image import engine_of, finish, image_run, pictures
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
    bring_to_source_pixels(monkeypatch)


def drawn(engine: Any, run: Run) -> np.ndarray:
    engine.open(run)
    return pictures(finish(engine), run)[0]


def differs(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def stock(folder: Path, mask: bool = False) -> Any:
    from triton_omni.backends.diffusion import upstream

    return stock_of(getattr(upstream, "QwenImageEditInpaintPipeline" if mask else "QwenImageEditPipeline"), folder)


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
def test_an_edit_with_a_lora_is_that_of_diffusers(
    folder: Path, tmp_path: Path, batching: str, most_levels: int, with_mask: bool
) -> None:
    lora = save_lora(folder, tmp_path)
    engine = engine_of(folder, batching=batching, defaults=SMALL, loras={"ink": str(lora)})
    pipe = stock(folder, with_mask)
    pipe.load_lora_weights(lora, adapter_name="ink")
    asked: dict[str, Any] = {"steps": 4, "seed": 1, "negative_prompt": " ", "true_cfg_scale": 2.5}
    mask = hole(64, 64) if with_mask else None
    plain = drawn(engine, edit_run("a red 7", [photo(64, 64, 3)], mask, **asked))
    for scale in (1.0, 0.5):
        pipe.set_adapters(["ink"], [scale])
        run = edit_run("a red 7", [photo(64, 64, 3)], mask, **asked, lora="ink", lora_scale=scale)
        (theirs,) = edited_by(pipe, run, "pil")
        assert differs(theirs, plain) > 2
        assert differs(drawn(engine, run), theirs) <= most_levels


@pytest.mark.usefixtures("small_stock")
def test_an_edit_with_a_step_cache_is_that_of_diffusers_and_leaves_others_alone(folder: Path) -> None:
    from triton_omni.backends.diffusion.upstream import FirstBlockCacheConfig

    engine = engine_of(folder, step_cache_threshold=0.5, defaults=SMALL)
    asked: dict[str, Any] = {"steps": 8, "seed": 1, "negative_prompt": " ", "true_cfg_scale": 2.5}
    exact = drawn(engine, edit_run("two", [photo(64, 64, 3)], **asked))
    pipe = stock(folder)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    run = edit_run("two", [photo(64, 64, 3)], **asked, step_cache=True)
    (theirs,) = edited_by(pipe, run, "pil")
    neighbour = edit_run("two", [photo(64, 64, 3)], **asked)
    engine.open(neighbour)
    engine.open(run)
    events = finish(engine)
    assert differs(pictures(events, run)[0], theirs) <= 1
    assert differs(theirs, exact) > 0  # parts of steps were skipped
    assert np.array_equal(pictures(events, neighbour)[0], exact)


@pytest.mark.parametrize("with_mask", [False, True])
def test_fast_previews_of_an_edit_change_nothing(folder: Path, with_mask: bool) -> None:
    engine = engine_of(folder, defaults=SMALL)
    mask = hole(64, 64) if with_mask else None
    run = edit_run("a red 7", [photo(64, 64, 3)], mask, steps=6, seed=1, preview_every=2)
    engine.open(run)
    outputs = [e for e in finish(engine) if isinstance(e, EngineOutput)]
    assert [(e.meta["step"], e.meta.get("preview")) for e in outputs] == [(2, "fast"), (4, "fast"), (6, None)]
    assert {e.tensors[0].spec.shape for e in outputs} == {(128, 128, 3)}
    plain = drawn(engine, edit_run("a red 7", [photo(64, 64, 3)], mask, steps=6, seed=1))
    assert np.array_equal(np.asarray(outputs[-1].tensors[0].data), plain)


# --- preparing -----------------------------------------------------------------------------------------------
def test_others_wait_for_one_encode_between_two_of_their_steps(several_folder: Path) -> None:
    engine = engine_of(several_folder, defaults=SMALL)
    steady = image_run("a red 1", width=64, height=64, steps=12, seed=1)
    engine.open(steady)
    engine.step()
    guided: dict[str, Any] = {"steps": 3, "seed": 2, "negative_prompt": " ", "true_cfg_scale": 2.0}
    edit = edit_run("two", [photo(64, 64, 1), photo(40, 90, 2)], **guided)
    alone = drawn(
        engine_of(several_folder, defaults=SMALL), edit_run("two", [photo(64, 64, 1), photo(40, 90, 2)], **guided)
    )
    engine.open(edit)
    began = steady.state.step
    events: list[Any] = []
    while not edit.state.is_prepared:
        encoded, step = engine.model.encoded, steady.state.step
        events += engine.step()
        assert engine.model.encoded == encoded + 1
        assert steady.state.step == step + 1
    assert steady.state.step - began == 4  # both prompts with the pictures, and both pictures
    events += finish(engine)
    assert np.array_equal(pictures(events, edit)[0], alone)


def test_a_large_edit_that_will_step_alone_does_not_hold_up_the_others_while_it_is_prepared(folder: Path) -> None:
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


def test_equal_pictures_and_prompts_are_encoded_once(folder: Path) -> None:
    engine = engine_of(folder, defaults=SMALL)

    def encodes(prompt: str, seed: int, picture: np.ndarray, mask: np.ndarray | None = None) -> int:
        before, run = engine.model.encoded, edit_run(prompt, [picture], mask, steps=2, seed=seed)
        picture_drawn = drawn(engine, run)
        fresh = engine_of(folder, defaults=SMALL, cache_bytes=0)
        assert np.array_equal(drawn(fresh, edit_run(prompt, [picture], mask, steps=2, seed=seed)), picture_drawn)
        return engine.model.encoded - before

    assert encodes("two", 1, photo(64, 64, 1)) == 2
    assert encodes("two", 2, photo(64, 64, 1)) == 0
    assert encodes("two", 3, photo(64, 64, 1), hole(64, 64)) == 0  # a mask draws from the same distribution
    assert encodes("three", 1, photo(64, 64, 1)) == 1
    assert encodes("two", 1, photo(64, 64, 2)) == 2
    assert encodes("two", 1, photo(64, 64, 1).reshape(32, 128, 3)) == 2  # the same bytes, another picture


def test_what_is_kept_has_a_bound_in_bytes(folder: Path) -> None:
    engine = engine_of(folder, defaults=SMALL, cache_bytes=100_000)
    for seed in range(8):
        drawn(engine, edit_run("two", [photo(64, 64, seed)], steps=2, seed=1))
        assert 0 < engine.model.cache.bytes <= 100_000
    assert engine.model.encoded == 16
