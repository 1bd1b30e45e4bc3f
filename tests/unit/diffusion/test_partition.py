# SPDX-License-Identifier: Apache-2.0
"""Parallel forwards: partition, messages, failures between ranks, and conflicting deploy values."""

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
from triton_omni.backends.diffusion.parallel import partition as parallel  # noqa: E402 - torch
from triton_omni.backends.diffusion.parallel.forward import ParallelForward  # noqa: E402 - torch

Grids = tuple[tuple[int, int, int], ...]


@dataclass(eq=False)
class FakeInput:
    """A forward input with random tensors."""

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

    def timestep(self) -> Any:
        return self.moment

    def model_input(self) -> Any:
        return self.latents


def make_inputs() -> list[FakeInput]:
    return [
        FakeInput(2, ((1, 2, 3),), (5, 2)),
        FakeInput(1, ((1, 4, 4),), (3,)),
        FakeInput(3, ((1, 2, 2), (1, 1, 2), (1, 2, 1)), (4, 4)),
    ]


@pytest.mark.parametrize("by_image", [True, False])
def test_results_are_gathered_from_parts_in_any_order(by_image: bool) -> None:
    inputs = make_inputs()
    parts = parallel.parts_of(inputs, by_image)
    assert len(parts) == (11 if by_image else 5)
    results = [(p, p.model_input() + p.branches()[0].sum()) for p in parts]
    random.Random(1).shuffle(results)
    for one, prediction in zip(inputs, parallel.gather(results, inputs), strict=True):
        assert torch.equal(prediction.positive, one.latents + one.features[0].sum())
        if len(one.features) == 1:
            assert prediction.negative is None
        else:
            assert torch.equal(prediction.negative, one.latents + one.features[1].sum())


def test_two_branches_of_an_image_go_to_two_ranks() -> None:
    parts = parallel.parts_of([FakeInput(1, ((1, 4, 4),), (9, 2))], by_image=True)
    assert [part.tokens for part in parts] == [25, 18]
    assert sorted(parallel.partition([part.tokens for part in parts], 2)) == [0, 1]


def test_no_rank_has_more_than_another_by_more_than_one_part() -> None:
    rng = random.Random(3)
    for _ in range(300):
        tokens = [rng.randint(1, 4000) for _ in range(rng.randint(1, 30))]
        ranks = rng.randint(2, 8)
        held = [0] * ranks
        for rank, count in zip(parallel.partition(tokens, ranks), tokens, strict=True):
            held[rank] += count
        assert max(held) - min(held) <= max(tokens)


def test_unpack_restores_packed_parts_bit_for_bit_and_text_is_sent_once() -> None:
    parts = parallel.parts_of(make_inputs(), by_image=True)
    remote_parts = [parallel.RemotePart(parallel.PartShape.of(part)) for part in parts]
    for with_text in (True, False):
        for part in parts:
            part.source.latents += 1  # pyright: ignore[reportAttributeAccessIssue]
        values = parallel.pack(parts, with_text, torch.float32)
        parallel.unpack(values, remote_parts, with_text)
        for part, remote in zip(parts, remote_parts, strict=True):
            assert (remote.n, remote.grids) == (part.n, part.grids)
            assert torch.equal(remote.model_input(), part.model_input())
            assert torch.equal(remote.timestep(), part.timestep())
            assert torch.equal(remote.branches()[0], part.branches()[0])


@pytest.mark.parametrize("change", [-3, 3])
def test_values_that_do_not_match_the_parts_are_refused(change: int) -> None:
    parts = parallel.parts_of(make_inputs(), by_image=True)
    remote_parts = [parallel.RemotePart(parallel.PartShape.of(part)) for part in parts]
    values = parallel.pack(parts, True, torch.float32)
    wrong = values[:change] if change < 0 else torch.cat([values, values[:change]])
    with pytest.raises((ValueError, RuntimeError)):
        parallel.unpack(wrong, remote_parts, with_text=True)


# --- failures ------------------------------------------------------------------------------------------------
class FakeOwnForward:
    """The forward of this rank; returns its input."""

    def predict(self, inputs: Any) -> list[Prediction]:
        return [Prediction(source.model_input(), None) for source in inputs]

    def forget(self) -> None: ...


class FakeRanks:
    """Two other ranks that send the same reply to every request."""

    count = 3

    def __init__(self, reply: parallel.ForwardReply) -> None:
        self._reply = reply
        self.requested: list[int] = []

    def request(self, rank: int, request: parallel.ForwardRequest, values: Any) -> None:
        self.requested.append(rank)

    def reply(self, rank: int, deadline_s: float) -> parallel.ForwardReply:
        return self._reply

    def receive(self, rank: int, values: Any) -> None: ...
    def finish_send(self, rank: int, work: Any) -> None: ...


def parallel_forward(others: FakeRanks) -> ParallelForward:
    return ParallelForward(FakeOwnForward(), others, read_options({"model": "x", "parallel": {"cfg": 3}}, "denoiser"))  # pyright: ignore[reportArgumentType]


def test_step_that_breaks_off_between_ranks_ends_the_worker() -> None:
    others = FakeRanks(parallel.ForwardReply("", 1 << 50))  # too many channels to allocate
    with pytest.raises(StageFailed, match="broke off between the ranks"):
        parallel_forward(others).predict(make_inputs())


def test_inputs_that_cannot_be_packed_fail_before_any_request() -> None:
    others = FakeRanks(parallel.ForwardReply("", 4))
    inputs = make_inputs()
    inputs[0].moment = torch.rand(2)  # the timestep must be a scalar
    with pytest.raises(RuntimeError):
        parallel_forward(others).predict(inputs)
    assert not others.requested


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": {"cfg": 2, "context": 2}, "batching": "seq"}, "parallel: set either"),
        ({"parallel": {"context": 2}}, r"parallel\.context: .*seq"),
        ({"parallel": {"context": 2}, "batching": "pad"}, r"parallel\.context: .*seq"),
        ({"parallel": {"cfg": 2, "kind": "ring"}}, r"parallel\.kind: ring"),
        ({"parallel": {"context": 2, "kind": "ring"}, "batching": "seq"}, r"parallel\.kind: .*bfloat16"),
        ({"parallel": {"cfg": 2}, "loras": {"ink": "ink"}}, "loras: not supported with parallel"),
        ({"parallel": {"cfg": 2}, "step_cache_threshold": 0.1}, "step_cache_threshold: not supported with parallel"),
        ({"parallel": {"cfg": 2}, "compile": True, "batching": "seq"}, "compile: not supported with parallel"),
        ({"parallel": {"cfg": 2}, "offload": "sequential"}, "offload: not supported with parallel"),
        ({"parallel": {"cfg": 0}}, r"parallel\.cfg"),
        ({"parallel": {"ranks": 2}}, "parallel"),
        ({"parallel": {"contxt": 2}}, "did you mean 'context'"),
        ({"parallel": {"answer_s": 0}}, r"parallel\.answer_s"),
    ],
)
def test_conflicting_options_are_load_errors_that_name_the_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        read_options({"model": "x", **options}, "denoiser")


def test_default_is_one_rank() -> None:
    assert read_options({"model": "x"}, "denoiser").parallel.ranks == 1
    assert read_options({"model": "x", "parallel": {"cfg": 3}}, "denoiser").parallel.ranks == 3


@pytest.mark.parametrize(("parallel", "gpus"), [({"cfg": 3}, 2), ({"context": 2}, 1), ({}, 2)])
def test_number_of_gpus_other_than_ranks_is_a_load_error(parallel: dict[str, int], gpus: int) -> None:
    from triton_omni.backends.diffusion.parallel.ranks import check_gpus

    options = read_options({"model": "x", "batching": "seq", "parallel": parallel}, "denoiser")
    with pytest.raises(OptionsError, match=rf"stage 'denoiser': parallel needs .*{gpus} GPU.*gpus_per_instance"):
        check_gpus(options.parallel, gpus, "denoiser")
    check_gpus(options.parallel, options.parallel.ranks, "denoiser")
    check_gpus(options.parallel, 0, "denoiser")
