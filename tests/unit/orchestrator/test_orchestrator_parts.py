# SPDX-License-Identifier: Apache-2.0
"""Admission, checks of media slices, metrics: the pure parts."""

from __future__ import annotations

import random

import pytest

from perf import measures
from tests.kit.expect import accepts
from triton_omni.backends.control.messages import RunStats, Transfer
from triton_omni.backends.core.chunk import TensorSpec
from triton_omni.backends.core.errors import BadRequest, TooBusy
from triton_omni.backends.core.generate import GenerateRequest, Message, Part
from triton_omni.backends.core.pipeline import Operation, Output, Pipeline, Stage
from triton_omni.backends.orchestrator.admission import Admission
from triton_omni.backends.orchestrator.check import check_request, check_request_id
from triton_omni.backends.orchestrator.metrics import RUN_OUTCOMES, PipelineMetrics, Player
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE


def _no_engine(context):
    raise NotImplementedError


CHAT = Operation("chat", "eye", ("text",))
MEDIA = (
    TensorSpec("audio", "float32", (-1,)),
    TensorSpec("image", "uint8", (-1,)),
    TensorSpec("video", "uint8", (-1,)),
)
SEES = Pipeline("sees", (Stage("eye", _no_engine, inputs=MEDIA),), (), (Output("text", "eye"),), (CHAT,))
READS = Pipeline("reads", (Stage("eye", _no_engine),), (), (Output("text", "eye"),), (CHAT,))


def test_random_crowds_never_exceed_their_limits():
    rng = random.Random(5)
    admission = Admission(4, 6)
    waiting, live, number = {}, set(), 0
    for _ in range(20_000):
        draw = rng.random()
        if draw < 0.5:
            priority = rng.randint(-2, 2)
            if len(live) + len(waiting) < 10:
                admission.join(number, priority)
                waiting[number] = priority
            else:
                with pytest.raises(TooBusy):
                    admission.join(number, priority)
            number += 1
        elif draw < 0.75 and (waiting or live):
            entry = rng.choice(sorted([*waiting, *live]))
            admission.leave(entry)
            waiting.pop(entry, None)
            live.discard(entry)
        started = admission.admit() if rng.random() < 0.7 else []
        best = sorted(waiting, key=lambda e: (-waiting[e], e))[: len(started)]
        assert started == best
        live |= set(started)
        for entry in started:
            del waiting[entry]
        assert len(live) <= 4
        assert admission.live == live
        assert admission.queued == len(waiting)
        assert len(admission._queue) == len(waiting), "who left is forgotten at once"
    admission.leave(-1)  # unknown: nothing happens


@pytest.mark.parametrize(
    ("part", "media", "words"),
    [
        (Part("audio", length=5, sample_rate=16_000), {}, "needs the input tensor 'audio'"),
        (Part("audio", length=6, sample_rate=16_000), {"audio": 5}, "covers elements 0 to 6"),
        (Part("audio", offset=3, length=3, sample_rate=16_000), {"audio": 5}, "covers elements 3 to 6"),
        (Part("audio", length=0, sample_rate=16_000), {"audio": 5}, "covers"),
        (Part("audio", length=2**62, sample_rate=16_000), {"audio": 5}, "covers"),
        (Part("audio", length=5), {"audio": 5}, "sample_rate"),
        (Part("image", shape=(2, 2, 3)), {"image": 11}, "covers elements 0 to 12"),
        (Part("image", shape=()), {"image": 11}, "shape"),
        (Part("image", shape=(-2, -2, 3)), {"image": 12}, "shape"),
        (Part("image", shape=(0, 2, 3)), {"image": 12}, "shape"),
        (Part("video", shape=(2**40, 2**40)), {"video": 12}, "covers"),
    ],
)
def test_slices_outside_their_tensor_are_refused_by_place(part, media, words):
    request = GenerateRequest(messages=(Message("user", "a"), Message("user", (Part("text", "b"), part))))
    with pytest.raises(BadRequest, match=words) as caught:
        check_request(SEES, request, media)
    assert caught.value.where.startswith("messages[1].content[1]")


def test_valid_media_are_accepted():
    parts = (Part("image", shape=(2, 2, 3)), Part("image", offset=12, shape=(1, 2, 3)), Part("text", "x"))
    accepts(check_request, SEES, GenerateRequest(messages=(Message("user", parts),)), {"image": 18})


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_kinds_of_content_without_an_input_tensor_are_refused(kind):
    part = Part(kind, length=12, shape=(2, 2, 3), sample_rate=16_000)
    request = GenerateRequest(messages=(Message("user", "a"), Message("user", (Part("text", "b"), part))))
    with pytest.raises(BadRequest, match=f"'reads' takes text, not {kind}") as caught:
        check_request(READS, request, {kind: 12})
    assert caught.value.where == "messages[1].content[1]"


def test_parts_that_overlap_are_refused():
    parts = (Part("image", shape=(2, 2, 3)), Part("image", offset=6, shape=(2, 2, 3)))
    with pytest.raises(BadRequest, match="overlap") as caught:
        check_request(SEES, GenerateRequest(messages=(Message("user", parts),)), {"image": 18})
    assert caught.value.where == "messages[0].content[1]"


def test_unreferenced_media_are_refused():
    with pytest.raises(BadRequest, match="no message part refers to it"):
        check_request(SEES, GenerateRequest(messages=(Message("user", "x"),)), {"image": 5})
    check_request(SEES, GenerateRequest(messages=(Message("user", "x"),)), {"image": 0})


def test_unknown_stages_are_refused_by_name():
    with pytest.raises(BadRequest, match="stages: eye") as caught:
        check_request(SEES, GenerateRequest(messages=(Message("user", "x"),), stages={"listener": {}}), {})
    assert caught.value.where == "stages.listener"


@pytest.mark.parametrize("request_id", ["", "a", "ünïcode 🎻", "x" * 256, "../../etc/passwd", "'; --", "{}"])
def test_any_printable_id_is_accepted(request_id):
    accepts(check_request_id, request_id)


def test_metrics_add_up():
    metrics = PipelineMetrics(PIPELINE)
    for outcome, total_s, usage in (
        ("completed", 0.02, {"tokens": 2}),
        ("cancelled", 400.0, {}),
        ("too_busy", 0.0, {"tokens": 1}),
        ("completed", 1.0, {}),
    ):
        metrics.ended(outcome, total_s, usage)
    assert metrics.requests.values == {("completed",): 2, ("cancelled",): 1, ("too_busy",): 1}
    assert metrics.usage.values == {("tokens",): 3}
    completed = metrics.request_s.at("completed")
    assert completed.total == 2
    assert completed.cumulative == [sum(s <= b for s in (0.02, 1.0)) for b in completed.bounds] + [2]
    assert completed.sum == pytest.approx(1.02)
    assert metrics.request_s.at("cancelled").cumulative[-2:] == [0, 1], "above every bound: only in +Inf"


def test_a_run_without_a_workers_word_is_lost_or_refused():
    metrics = PipelineMetrics(PIPELINE)
    edges = {"tokens": Transfer(3, 300, 0.5, 0.25)}
    metrics.run_ended("frames", False, RunStats("finished", 2.0, 0.5, edges))
    metrics.run_ended("frames", False, RunStats("stopped", 1.0, None, edges))
    metrics.run_ended("frames", True, None)
    metrics.run_ended("frames", False, None)
    ended = {outcome: metrics.runs.values["frames", outcome] for outcome in RUN_OUTCOMES}
    assert ended == {"finished": 1, "stopped": 1, "lost": 1, "refused": 1, "failed": 0}
    assert (metrics.run_s.at("frames").total, metrics.run_s.at("frames").sum) == (2, 3.0)
    assert (metrics.run_first_s.at("frames").total, metrics.run_first_s.at("frames").sum) == (1, 0.5)
    edge = ("tokens", "frames")
    assert metrics.edge_chunks.values[edge] == 6
    assert metrics.edge_bytes.values[edge] == 600
    assert metrics.edge_transfer_s.values[edge] == 1.0
    assert metrics.edge_wait_s.values[edge] == 0.5


def test_the_listener_is_the_one_that_clients_measure_with():
    """The server's underrun and real-time factor are those of perf/measures.py, from the same times."""
    pieces = [
        measures.Piece(at, "audio", length) for at, length in ((1.0, 0.5), (1.25, 0.5), (2.25, 0.25), (2.75, 1.0))
    ]
    player, metrics = Player(), PipelineMetrics(PIPELINE)
    for piece in pieces:
        player.receive(piece.at_s, piece.audio_s)
    metrics.played(player, arrived_s=0.5)
    felt = measures.RequestTrace(0.5, pieces)
    assert metrics.audio_rtf.at().sum == measures.real_time_factor(felt)
    assert metrics.underrun_s.at().sum == max(measures.underruns_s(felt)) == 0.25
