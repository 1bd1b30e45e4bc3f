# SPDX-License-Identifier: Apache-2.0
"""Admission, checks of media slices, metrics: the pure parts."""

from __future__ import annotations

import random

import pytest

from backends.core.errors import BadRequest, TooBusy
from backends.core.generate import GenerateRequest, Message, Part
from backends.core.pipeline import Operation, Output, Pipeline, Stage
from backends.core.request import End, Outcome
from backends.orchestrator.admission import Admission
from backends.orchestrator.check import check_request, check_request_id
from backends.orchestrator.metrics import BUCKETS_S, Metrics


def _no_engine(context):
    raise NotImplementedError


CHAT = Operation("chat", "eye", ("text",))
SEES = Pipeline("sees", (Stage("eye", _no_engine),), (), (Output("text", "eye"),), (CHAT,))


def test_random_crowds_never_exceed_their_limits():
    rng = random.Random(5)
    admission = Admission(4, 6)
    waiting, live, number = {}, set(), 0
    for _ in range(20_000):
        dice = rng.random()
        if dice < 0.5:
            priority = rng.randint(-2, 2)
            if len(live) + len(waiting) < 10:
                admission.join(number, priority)
                waiting[number] = priority
            else:
                with pytest.raises(TooBusy):
                    admission.join(number, priority)
            number += 1
        elif dice < 0.75 and (waiting or live):
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


def test_good_media_pass():
    parts = (Part("image", shape=(2, 2, 3)), Part("image", offset=12, shape=(1, 2, 3)), Part("text", "x"))
    check_request(SEES, GenerateRequest(messages=(Message("user", parts),)), {"image": 18})


def test_media_nobody_refers_to_are_refused():
    with pytest.raises(BadRequest, match="no message part refers to it"):
        check_request(SEES, GenerateRequest(messages=(Message("user", "x"),)), {"image": 5})
    check_request(SEES, GenerateRequest(messages=(Message("user", "x"),)), {"image": 0})


def test_unknown_stages_are_refused_by_name():
    with pytest.raises(BadRequest, match="stages: eye") as caught:
        check_request(SEES, GenerateRequest(messages=(Message("user", "x"),), stages={"ear": {}}), {})
    assert caught.value.where == "stages.ear"


@pytest.mark.parametrize("request_id", ["", "a", "ünïcode 🎻", "x" * 256, "../../etc/passwd", "'; --", "{}"])
def test_any_printable_id_is_fine(request_id):
    check_request_id(request_id)


def test_metrics_add_up():
    metrics = Metrics()
    metrics.ended(End(Outcome.COMPLETED, "text", "t", "stop", {"tokens": 2}), 0.02)
    metrics.ended(End(Outcome.CANCELLED, "text", "t", "abort", {}), 400.0)
    metrics.ended(End(Outcome.FAILED, "text", "t", "error", {"tokens": 1}, TooBusy("x")), 1.0)
    metrics.refused("bad_request")
    metrics.sent("text", 0, 0.005)
    metrics.sent("text", 1, 9.0)
    assert metrics.requests == {"completed": 1, "cancelled": 1, "too_busy": 1, "bad_request": 1}
    assert metrics.usage == {"tokens": 3}
    assert metrics.pieces == {"text": 2}
    first = metrics.first_output_s["text"]
    assert (first.total, first.counts[0]) == (1, 1)
    assert metrics.total_s.total == 3
    assert metrics.total_s.counts == [sum(s <= b for s in (0.02, 400.0, 1.0)) for b in BUCKETS_S]
    assert metrics.total_s.sum_s == pytest.approx(401.02)
