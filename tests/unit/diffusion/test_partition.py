# SPDX-License-Identifier: Apache-2.0
"""Steps shared by ranks: who gets what, how it travels, what breaks off, and deploy values that contradict."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from triton_omni.backends.core.engine import OptionsError
from triton_omni.backends.core.errors import StageFailed
from triton_omni.backends.diffusion.options import read_options

torch = pytest.importorskip("torch")

from triton_omni.backends.diffusion.forward import Prediction  # noqa: E402 - torch
from triton_omni.backends.diffusion.parallel import partition as shares  # noqa: E402 - torch
from triton_omni.backends.diffusion.parallel.forward import Spread  # noqa: E402 - torch

Grids = tuple[tuple[int, int, int], ...]


@dataclass(eq=False)
class Drawn:
    """Pictures with numbers of their own."""

    n: int
    grids: Grids
    texts: tuple[int, ...]

    def __post_init__(self) -> None:
        tokens = sum(rows * columns for _, rows, columns in self.grids)
        self.latents = torch.rand(self.n, tokens, 4)
        self.features = tuple(torch.rand(1, length, 6) for length in self.texts)
        self.moment = torch.rand(())

    def branches(self) -> tuple[Any, ...]:
        return self.features

    def time(self) -> Any:
        return self.moment

    def seen(self) -> Any:
        return self.latents


def drawings() -> list[Drawn]:
    return [
        Drawn(2, ((1, 2, 3),), (5, 2)),
        Drawn(1, ((1, 4, 4),), (3,)),
        Drawn(3, ((1, 2, 2), (1, 1, 2), (1, 2, 1)), (4, 4)),
    ]


@pytest.mark.parametrize("by_picture", [True, False])
def test_parts_are_put_together_again_in_any_order(by_picture: bool) -> None:
    drawn = drawings()
    parts = shares.parts_of(drawn, by_picture)
    assert len(parts) == (11 if by_picture else 5)
    found = [(p, p.seen() + p.branches()[0].sum()) for p in parts]
    random.Random(1).shuffle(found)
    for one, prediction in zip(drawn, shares.together(found, drawn), strict=True):
        assert torch.equal(prediction.positive, one.latents + one.features[0].sum())
        if len(one.features) == 1:
            assert prediction.negative is None
        else:
            assert torch.equal(prediction.negative, one.latents + one.features[1].sum())


def test_the_two_branches_of_a_picture_go_to_two_ranks() -> None:
    parts = shares.parts_of([Drawn(1, ((1, 4, 4),), (9, 2))], by_picture=True)
    assert [part.tokens for part in parts] == [25, 18]
    assert sorted(shares.deal([part.tokens for part in parts], 2)) == [0, 1]


def test_no_rank_has_more_than_another_by_more_than_one_part() -> None:
    rng = random.Random(3)
    for _ in range(300):
        tokens = [rng.randint(1, 4000) for _ in range(rng.randint(1, 30))]
        ranks = rng.randint(2, 8)
        held = [0] * ranks
        for rank, count in zip(shares.deal(tokens, ranks), tokens, strict=True):
            held[rank] += count
        assert max(held) - min(held) <= max(tokens)


def test_what_is_packed_is_unpacked_bit_for_bit_and_texts_travel_once() -> None:
    parts = shares.parts_of(drawings(), by_picture=True)
    copies = [shares.Copy(shares.Outline.of(part)) for part in parts]
    for with_text in (True, False):
        for part in parts:
            part.drawing.latents += 1  # pyright: ignore[reportAttributeAccessIssue]
        numbers = shares.pack(parts, with_text, torch.float32)
        shares.unpack(numbers, copies, with_text)
        for part, copy in zip(parts, copies, strict=True):
            assert (copy.n, copy.grids) == (part.n, part.grids)
            assert torch.equal(copy.seen(), part.seen())
            assert torch.equal(copy.time(), part.time())
            assert torch.equal(copy.branches()[0], part.branches()[0])


@pytest.mark.parametrize("change", [-3, 3])
def test_numbers_that_are_not_the_parts_are_refused(change: int) -> None:
    parts = shares.parts_of(drawings(), by_picture=True)
    copies = [shares.Copy(shares.Outline.of(part)) for part in parts]
    numbers = shares.pack(parts, True, torch.float32)
    wrong = numbers[:change] if change < 0 else torch.cat([numbers, numbers[:change]])
    with pytest.raises((ValueError, RuntimeError)):
        shares.unpack(wrong, copies, with_text=True)


# --- what breaks off -------------------------------------------------------------------------------------------
class Own:
    """A forward of this rank that finds nothing but zeros."""

    def predict(self, drawings: Any) -> list[Prediction]:
        return [Prediction(d.seen(), None) for d in drawings]

    def forget(self) -> None: ...


class Others:
    """Two followers that have the same answer to everything."""

    count = 3

    def __init__(self, answer: shares.Answer) -> None:
        self._answer = answer
        self.asked: list[int] = []

    def ask(self, rank: int, ask: shares.Ask, numbers: Any) -> None:
        self.asked.append(rank)

    def answer(self, rank: int, deadline_s: float) -> shares.Answer:
        return self._answer

    def take(self, rank: int, numbers: Any) -> None: ...
    def sent(self, rank: int, work: Any) -> None: ...


def spread(others: Others) -> Spread:
    return Spread(Own(), others, read_options({"model": "x", "parallel": {"cfg": 3}}, "denoiser"))  # pyright: ignore[reportArgumentType]


def test_a_step_that_breaks_off_between_ranks_ends_the_worker_and_not_one_request() -> None:
    others = Others(shares.Answer("", 1 << 50))  # so many channels that there is no memory to take them
    with pytest.raises(StageFailed, match="broke off between the ranks"):
        spread(others).predict(drawings())


def test_what_cannot_be_sent_fails_before_anybody_is_asked() -> None:
    others = Others(shares.Answer("", 4))
    drawn = drawings()
    drawn[0].moment = torch.rand(2)  # of its parts no rank but the first can be told the time
    with pytest.raises(RuntimeError):
        spread(others).predict(drawn)
    assert not others.asked


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"parallel": {"cfg": 2, "context": 2}, "batching": "seq"}, "parallel: either"),
        ({"parallel": {"context": 2}}, r"parallel\.context: .*seq"),
        ({"parallel": {"context": 2}, "batching": "pad"}, r"parallel\.context: .*seq"),
        ({"parallel": {"cfg": 2, "kind": "ring"}}, r"parallel\.kind: ring"),
        ({"parallel": {"context": 2, "kind": "ring"}, "batching": "seq"}, r"parallel\.kind: .*bfloat16"),
        ({"parallel": {"cfg": 2}, "loras": {"ink": "ink"}}, "loras: not with parallel"),
        ({"parallel": {"cfg": 2}, "step_cache_threshold": 0.1}, "step_cache_threshold: not with parallel"),
        ({"parallel": {"cfg": 2}, "compile": True, "batching": "seq"}, "compile: not with parallel"),
        ({"parallel": {"cfg": 2}, "offload": "sequential"}, "offload: not with parallel"),
        ({"parallel": {"cfg": 0}}, r"parallel\.cfg"),
        ({"parallel": {"ranks": 2}}, "parallel"),
        ({"parallel": {"contxt": 2}}, "did you mean 'context'"),
        ({"parallel": {"answer_s": 0}}, r"parallel\.answer_s"),
    ],
)
def test_contradictions_are_load_errors_that_name_the_key(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionsError, match=says):
        read_options({"model": "x", **given}, "denoiser")


def test_ranks_are_one_unless_said() -> None:
    assert read_options({"model": "x"}, "denoiser").parallel.ranks == 1
    assert read_options({"model": "x", "parallel": {"cfg": 3}}, "denoiser").parallel.ranks == 3


@pytest.mark.parametrize(("parallel", "gpus"), [({"cfg": 3}, 2), ({"context": 2}, 1), ({}, 2)])
def test_another_number_of_gpus_than_of_ranks_is_a_load_error(parallel: dict[str, int], gpus: int) -> None:
    from triton_omni.backends.diffusion.parallel.ranks import check_gpus

    options = read_options({"model": "x", "batching": "seq", "parallel": parallel}, "denoiser")
    with pytest.raises(OptionsError, match=rf"stage 'denoiser': parallel .* rank.*{gpus} GPU.*gpus_per_instance"):
        check_gpus(options.parallel, gpus, "denoiser")
    check_gpus(options.parallel, options.parallel.ranks, "denoiser")
    check_gpus(options.parallel, 0, "denoiser")
