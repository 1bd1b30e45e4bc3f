# SPDX-License-Identifier: Apache-2.0
"""Edits by the diffusion engine against diffusers' own edit pipelines on tiny random checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.diffusers_edit import edit_with, load_stock, use_small_source_size
from tests.kit.tiny_edit import SOURCE_PIXELS, edit_run, hole, photo, save_tiny_edit
from tests.kit.tiny_image import ends, engine_of, finish, generate_latents, image_run, images_of
from triton_omni.backends.core.engine import EngineFinished, EngineOutput, Run
from triton_omni.backends.core.errors import BadRequest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(280)

LONG = "draw a small green cat with a sign that says hello in front of the background"
SMALL = {"source_pixels": SOURCE_PIXELS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_edit(tmp_path_factory.mktemp("edit") / "one")


@pytest.fixture(scope="module")
def several_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_edit(tmp_path_factory.mktemp("edit") / "several", several=True)


@pytest.fixture(scope="module")
def zero_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_edit(tmp_path_factory.mktemp("edit") / "zero", several=True, sources_at_zero=True)


@pytest.fixture
def small_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_source_size(monkeypatch)


def whole() -> list[Run]:
    """Edits of whole images, that differ in every way that a batch allows."""
    wide, tall, square = photo(150, 60, 1), photo(40, 90, 2), photo(64, 64, 3)
    return [
        edit_run("a red handwritten 7", [square], steps=5, seed=1),
        edit_run("3", [wide], negative_prompt=" ", true_cfg_scale=2.5, steps=6, seed=2),
        edit_run(LONG, [tall], negative_prompt="orange", true_cfg_scale=4.0, steps=4, seed=3, n=2),
        edit_run("two", [wide], width=64, height=96, steps=5, seed=4),
    ]


def masked() -> list[Run]:
    wide, square = photo(150, 60, 1), photo(64, 64, 3)
    return [
        edit_run("a red 7", [square], hole(64, 64), steps=5, seed=1),
        edit_run(LONG, [wide], hole(150, 60), negative_prompt=" ", true_cfg_scale=3.0, steps=6, seed=2, n=2),
    ]


def several() -> list[Run]:
    return [
        edit_run("a red 7", [photo(64, 64, 3)], steps=5, seed=1),
        edit_run(LONG, [photo(150, 60, 1), photo(40, 90, 2)], negative_prompt=" ", true_cfg_scale=3.0, steps=4, seed=2),
    ]


CASES = {
    "whole": ("folder", "QwenImageEditPipeline", whole),
    "masked": ("folder", "QwenImageEditInpaintPipeline", masked),
    "several": ("several_folder", "QwenImageEditPlusPipeline", several),
    "several, sources at time zero": ("zero_folder", "QwenImageEditPlusPipeline", several),
}


@pytest.mark.usefixtures("small_stock")
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("batching", "tolerance"), [("seq", 0.0), ("pad", 1e-5), ("packed", 1e-5)])
def test_edits_equal_the_stock_pipeline(
    request: pytest.FixtureRequest, case: str, batching: str, tolerance: float
) -> None:
    from triton_omni.backends.diffusion import upstream

    fixture, kind, make = CASES[case]
    folder = request.getfixturevalue(fixture)
    stock = load_stock(getattr(upstream, kind), folder)
    engine = engine_of(folder, batching=batching, defaults=SMALL)
    runs = make()
    latents, events = generate_latents(engine, runs)
    for run, ours in zip(runs, latents, strict=True):
        assert [type(e) for e in ends(events, run)] == [EngineFinished]
        assert float(np.abs(ours.numpy() - np.stack(edit_with(stock, run, "latent"))).max()) <= tolerance
        for ours, theirs in zip(images_of(events, run), edit_with(stock, run, "pil"), strict=True):
            assert ours.shape == theirs.shape
            assert int(np.abs(ours.astype(int) - theirs.astype(int)).max()) <= (1 if tolerance else 0)


def test_source_sizes_equal_the_stock_pipelines() -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    from triton_omni.backends.diffusion.image_params import source_size

    for height in range(1, 1400, 23):
        for width in range(1, 1400, 29):
            for area in (1024 * 1024, 384 * 384):
                assert source_size((height, width, 3), area) == calculate_dimensions(area, width / height)[:2]


@pytest.mark.soak  # a minute alone, many where others use the cores, too
@pytest.mark.parametrize("with_mask", [False, True])
def test_source_image_is_resized_to_a_megapixel_as_by_the_stock_pipeline(folder, with_mask: bool) -> None:
    from triton_omni.backends.diffusion.upstream import QwenImageEditInpaintPipeline, QwenImageEditPipeline

    run = edit_run("a red 7", [photo(300, 170)], hole(300, 170) if with_mask else None, steps=2, seed=1)
    engine = engine_of(folder)
    engine.open(run)
    (ours,) = images_of(finish(engine), run)
    stock = load_stock(QwenImageEditInpaintPipeline if with_mask else QwenImageEditPipeline, folder)
    (theirs,) = edit_with(stock, run, "pil")
    assert ours.shape == theirs.shape == (768, 1376, 3)
    assert int(np.abs(ours.astype(int) - theirs.astype(int)).max()) <= 1


# --- beside images from text -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def engine(folder) -> Any:
    return engine_of(folder, defaults=SMALL)


def test_edit_checkpoint_also_generates_from_text_in_the_same_batch(folder, engine: Any) -> None:
    from triton_omni.backends.diffusion.upstream import QwenImagePipeline

    drawn = image_run("a blue 5", width=64, height=96, steps=5, seed=3, negative_prompt=" ", true_cfg_scale=2.0)
    edited = edit_run("a red 7", [photo(150, 60)], steps=5, seed=1)
    before = engine.forwards
    for run in (drawn, edited):
        engine.open(run)
    events = finish(engine)
    assert engine.forwards - before <= 6  # an edit is encoded a step after the first comes
    parts = {name: part for name, part in stock_parts(folder).items() if name != "processor"}
    stock = QwenImagePipeline(**parts)
    (theirs,) = stock(
        "a blue 5", negative_prompt=" ", true_cfg_scale=2.0, width=64, height=96, num_inference_steps=5,
        generator=torch.Generator().manual_seed(3),
    ).images  # fmt: skip
    assert int(np.abs(images_of(events, drawn)[0].astype(int) - np.asarray(theirs).astype(int)).max()) <= 1


def stock_parts(folder: Path) -> dict[str, Any]:
    from triton_omni.backends.diffusion.upstream import QwenImageEditPipeline

    return load_stock(QwenImageEditPipeline, folder).components


def test_unmasked_region_stays_and_the_rest_changes(engine: Any) -> None:
    source = photo(128, 128)
    run = edit_run("a red 7", [source], hole(128, 128), steps=6, seed=1, partial_images=2)
    engine.open(run)
    state = run.state
    while state.steps_left:
        events = engine.step()
    events = [*events, *finish(engine)]
    kept = state.inpaint.mask == 0
    assert 0.4 < float(kept.float().mean()) < 0.6
    assert torch.equal(state.latents[kept], state.condition[kept])
    assert not torch.isclose(state.latents[~kept], state.condition[~kept]).all()
    assert [e.piece.partial for e in events if isinstance(e, EngineOutput)][-1] is False


def test_usage_counts_image_tokens(engine: Any) -> None:
    run = edit_run("a red 7", [photo(128, 128)], steps=2, seed=1)
    engine.open(run)
    (end,) = ends(finish(engine), run)
    assert isinstance(end, EngineFinished)
    assert end.usage["prompt_image_tokens"] == 25  # 128 is resized to 5 x 28
    assert 25 < end.usage["prompt_tokens"] < 45
    assert end.usage["completion_tokens"] == 64


def test_special_tokens_in_an_edit_prompt_are_text(engine: Any) -> None:
    run = edit_run("a red <|image_pad|> 7", [photo(128, 128)], steps=2, seed=1)
    engine.open(run)
    assert isinstance(ends(finish(engine), run)[0], EngineFinished)


@pytest.mark.parametrize(
    ("prompt", "items", "mask", "where", "says"),
    [
        ("x", [], None, "messages", "needs an image"),
        (" ", [photo(64, 64)], None, "messages", "must not be empty"),
        ("x", [photo(64, 64), photo(64, 64)], None, "messages[0].content[1]", "takes at most 1 image"),
        ("x", [photo(64, 64)], hole(64, 32), "messages[0].content[1].shape", "height and width"),
        ("x", [photo(640, 64)], None, "messages[0].content[0].shape", "640x64"),
        ("x", [np.zeros((8, 8, 4), np.uint8)], None, "messages[0].content[0].shape", "height, width, 3"),
        ("red " * 3000, [photo(64, 64)], None, "messages", "must be at most 512 tokens"),
    ],
)
def test_invalid_edit_is_refused(
    engine: Any, prompt: str, items: list[np.ndarray], mask: np.ndarray | None, where: str, says: str
) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        engine.open(edit_run(prompt, items, mask, steps=2))
    assert caught.value.where == where
    assert not engine.has_work


def test_mask_fixes_the_size(engine: Any) -> None:
    with pytest.raises(BadRequest, match="128x128") as caught:
        engine.open(edit_run("x", [photo(64, 64)], hole(64, 64), width=64, height=64, steps=2))
    assert caught.value.where == "stages.denoiser.width"


def test_unsupported_inputs_of_each_checkpoint_kind_are_named(several_folder, tmp_path: Path) -> None:
    from tests.kit.tiny_image import save_tiny_image

    with pytest.raises(BadRequest, match="does not take a mask") as caught:
        engine_of(several_folder, defaults=SMALL).open(edit_run("x", [photo(64, 64)], hole(64, 64), steps=2))
    assert caught.value.where == "messages[0].content[1]"
    with pytest.raises(BadRequest, match="text only"):
        engine_of(save_tiny_image(tmp_path / "tiny")).open(edit_run("x", [photo(64, 64)], steps=2))


def test_tiled_and_bfloat16_edits(folder) -> None:
    for options in ({"vae_tiling": True}, {"dtype": "bfloat16"}):
        engine = engine_of(folder, defaults=SMALL, **options)
        run = edit_run("a red 7", [photo(64, 64)], hole(64, 64), steps=3, seed=1)
        engine.open(run)
        assert images_of(finish(engine), run)[0].shape == (128, 128, 3)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
def test_files_of_images_to_edit_are_read_as_by_diffusers(mode: str, tmp_path: Path) -> None:
    """`load_image` drops transparency: hidden colors show."""
    from diffusers.utils.loading_utils import load_image
    from PIL import Image

    from triton_omni.media.images import decode_image

    layers = np.dstack([photo(40, 30), photo(40, 30, 5)[..., :1]])
    file = tmp_path / ("image.jpeg" if mode == "CMYK" else "image.png")
    Image.fromarray(layers, "RGBA").convert(mode if mode != "P" else "RGB").convert(mode).save(file)
    assert np.array_equal(decode_image(file.read_bytes(), "drop"), np.asarray(load_image(str(file))))
