# SPDX-License-Identifier: Apache-2.0
"""Memory estimates against torch's measured peaks; requests that do not fit are refused or wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.tiny_edit import SOURCE_PIXELS, edit_run, photo, save_tiny_edit
from tests.kit.tiny_image import engine_of, finish, image_run, images_of, save_tiny_image
from triton_omni.backends.core.engine import Run
from triton_omni.backends.core.errors import BadRequest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(200)

GUIDED = {"negative_prompt": " ", "true_cfg_scale": 2.0}
SMALL = {"source_pixels": SOURCE_PIXELS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_image(tmp_path_factory.mktemp("image") / "tiny")


@pytest.fixture(scope="module")
def edit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_edit(tmp_path_factory.mktemp("edit") / "several", several=True)


def asked(kind: str) -> Run:
    if kind == "edit":
        return edit_run("two", [photo(64, 64, 1), photo(300, 200, 2)], **GUIDED, steps=2, seed=1)
    more: dict[str, Any] = {"plain": {}, "guided": GUIDED, "guided, 2 images": {**GUIDED, "n": 2}}[kind]
    return image_run("a red 7 on a white background", width=256, height=256, steps=2, seed=1, **more)


@pytest.mark.parametrize("kind", ["plain", "guided", "guided, 2 images", "edit"])
@pytest.mark.parametrize(
    "deploy",
    [{}, {"batching": "pad"}, {"batching": "seq"}, {"vae_tiling": True}, {"dtype": "bfloat16"}],
    ids=["packed", "pad", "seq", "tiled", "bfloat16"],
)
def test_memory_estimate_covers_the_measured_peak_and_is_not_far_above(
    folder: Path, edit_folder: Path, kind: str, deploy: dict[str, Any]
) -> None:
    from tests.kit.torch_peak_memory import peak_bytes

    engine = engine_of(edit_folder if kind == "edit" else folder, cache_bytes=0, defaults=SMALL, **deploy)
    run, model = asked(kind), engine.model
    engine.open(run)
    image = run.state
    needs = image.needs
    with torch.inference_mode():
        encodes = []
        while model.missing(image):
            encodes.append(peak_bytes(lambda: model.encode(image)))
        if kind == "edit":
            viewed = image.encode_tasks[image.prompt, image.image_digests].args[1]()  # kept until all is encoded
            kept = [*viewed.values(), *image.encoded.values()]
            assert sum(t.untyped_storage().nbytes() for t in kept) <= needs.held
        prepare = peak_bytes(lambda: model.prepare(image))
        step = peak_bytes(lambda: model.predict([image]))
        model.forward.forget()
        latents = image.current_latents() if engine.options.batching == "seq" else image.current_latents()[:1]
        decode = peak_bytes(lambda: model.decode(latents, image.spec.width, image.spec.height))
    assert step <= needs.step, f"{step} of {needs}"
    assert max(*encodes, step, decode) <= needs.peak, f"{encodes}, {step}, {decode} of {needs}"
    held = [t for t in (image.latents, image.condition, image.positive, image.negative) if t is not None]
    assert max(prepare, sum(t.nbytes for t in held)) <= needs.held
    assert needs.peak <= 3 * max(*encodes, step, decode)


# --- refused -------------------------------------------------------------------------------------------------
def test_request_that_never_fits_is_refused_with_the_field(folder: Path) -> None:
    engine = engine_of(folder, memory_bytes=19_000_000)
    engine.open(image_run("two", width=256, height=256, steps=2))
    engine.close()
    with pytest.raises(BadRequest, match=r"needs about \d+ MB of memory; this stage has 19 MB") as caught:
        engine.open(image_run("two", width=512, height=512, steps=2))
    assert caught.value.where == "stages.denoiser.width"
    with pytest.raises(BadRequest, match="memory") as caught:
        engine.open(image_run("two", width=256, height=256, steps=2, n=10))
    assert caught.value.where == "stages.denoiser.n"
    assert not engine.has_work and not engine.model.encode_count


def test_default_memory_limit_is_the_free_memory(folder: Path) -> None:
    from triton_omni.backends.diffusion.memory import free_bytes

    assert 0 < engine_of(folder).model.memory.limit_bytes < free_bytes(torch.device("cpu")) + (1 << 30)


def test_offloaded_weights_reduce_the_memory_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton_omni.backends.diffusion import memory
    from triton_omni.backends.diffusion.options import DiffusionOptions

    pipe, free = engine_of(folder).model.pipe, 10**9
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    sizes = [sum(p.nbytes for p in n.parameters()) for n in (pipe.transformer, pipe.vae, pipe.text_encoder)]

    def lacking(offload: Any) -> int:
        options = DiffusionOptions("x", batching="seq", offload=offload)
        return round(
            free - memory.ImageMemory(pipe, options, torch.device("cpu")).limit_bytes / memory.FREE_MEMORY_SHARE
        )

    assert lacking("none") == 0
    assert abs(lacking("model") - max(sizes)) <= 2
    assert 0 < lacking("sequential") < max(sizes)


# --- waiting -------------------------------------------------------------------------------------------------
def needs_of(folder: Path, run: Run) -> Any:
    engine = engine_of(folder)
    engine.open(run)
    return run.state.needs


def twins(count: int) -> list[Run]:
    return [image_run("two", width=64, height=64, steps=5, seed=i) for i in range(count)]


def test_run_that_does_not_fit_waits_until_another_is_done(folder: Path) -> None:
    needs = needs_of(folder, twins(1)[0])
    engine = engine_of(folder, memory_bytes=2 * needs.held + needs.peak)
    runs = twins(5)
    alone = []
    for run in twins(5):
        engine.open(run)
        alone.append(images_of(finish(engine), run)[0])
    for run in runs:
        engine.open(run)
    events: list[Any] = []
    most_inside = 0
    while engine.has_work:
        events += engine.step()
        inside = [r for r in runs if r.state.is_admitted and r.state in engine._image_runs]
        most_inside = max(most_inside, len(inside))
        assert sum(r.state.needs.held for r in inside) + needs.peak <= engine.model.memory.limit_bytes
    assert most_inside == 2
    for run, image in zip(runs, alone, strict=True):
        assert np.array_equal(images_of(events, run)[0], image)


def test_batch_is_bounded_by_memory(folder: Path) -> None:
    needs = needs_of(folder, twins(1)[0])
    engine = engine_of(folder, memory_bytes=4 * needs.held + max(needs.peak, 3 * needs.step))
    most = max(needs.peak, 3 * needs.step) // needs.step
    for run in twins(4):
        engine.open(run)
    while engine.has_work:
        batch = engine._select([r for r in engine._image_runs if r.can_step])
        assert sum(r.needs.step for r in batch) <= most * needs.step
        engine.step()


def test_large_new_run_blocks_later_ones_until_it_is_admitted(folder: Path) -> None:
    from triton_omni.backends.diffusion.memory import admit

    first, late = twins(2)
    large = image_run("two", width=128, height=128, steps=5, n=8, seed=7)
    engine = engine_of(folder)
    for run in (first, large, late):
        engine.open(run)
    waiting = [run.state for run in (first, large, late)]
    inside = [waiting[0]]
    waiting[0].encoded["a piece"] = torch.zeros(1)
    most = waiting[0].needs.held + waiting[1].needs.held + waiting[1].needs.peak
    assert admit(waiting, inside, most - 1)[0] == [waiting[0]]
    fit, left = admit(waiting, inside, most)
    assert fit == waiting[:2] and left == waiting[1].needs.peak
    assert admit([waiting[0], waiting[2], waiting[1]], inside, most - 1)[0] == [waiting[0], waiting[2]]


def test_blocked_run_that_holds_all_memory_does_not_make_the_engine_spin(folder: Path) -> None:
    needs = needs_of(folder, twins(1)[0])
    engine = engine_of(folder, memory_bytes=needs.held + needs.peak)
    held, waiting = twins(2)
    engine.open(held)
    engine.step()
    held.blocked = True
    engine.open(waiting)
    assert not engine.has_work
    held.blocked = False
    assert len(images_of(finish(engine), held)) == 1
