# SPDX-License-Identifier: Apache-2.0
"""Errors survive their way over the wire, whatever stands in them."""

from __future__ import annotations

import random

import pytest

from triton_omni.backends.core import errors
from triton_omni.backends.core.errors import (
    BY_CODE,
    BadRequest,
    ErrorInfo,
    Internal,
    OmniError,
    StageFailed,
    TooBusy,
    WorkerDied,
    from_line,
)


@pytest.mark.parametrize("kind", BY_CODE.values())
@pytest.mark.parametrize(
    "where", ["", "sampling.top_p", "messages[0].content[12].sample_rate", "tokens->frames", "stages[...]"]
)
@pytest.mark.parametrize("message", ["", "no", "two\nlines [and: brackets]", "] x", "[internal:x] nested"])
def test_a_line_is_read_back(kind, where, message):
    back = from_line(kind(message, where).line())
    assert type(back) is kind
    assert (back.message, back.where) == (message, where)


def test_hostile_places_are_read_back_as_one_place():
    rng = random.Random(1)
    for _ in range(3_000):
        where = "".join(rng.choice("[]ab.: \n") for _ in range(rng.randint(1, 12)))
        back = from_line(BadRequest("text", where).line())
        assert type(back) is BadRequest
        assert back.message == "text"
        assert len(back.where) == len(where)


def test_a_line_has_bounded_length():
    line = BadRequest("m" * 10_000_000, "w" * 10_000_000).line()
    assert len(line) < 3_000


@pytest.mark.parametrize(
    "line", ["", "no form", "[unknown_code] x", "[BadRequest] x", "bad_request: x", "[bad_request"]
)
def test_any_other_text_is_internal(line):
    back = from_line(line)
    assert type(back) is Internal
    assert back.message == line


def test_every_class_has_its_own_code():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, OmniError)]
    assert {c.code for c in classes} == set(BY_CODE)
    assert set(classes) - set(BY_CODE.values()) == {OmniError, WorkerDied}, "Internal and StageFailed to clients"
    assert all(400 <= c.status < 600 for c in classes)


def test_the_death_of_a_worker_is_known_between_processes_and_a_failed_stage_to_clients():
    error = ErrorInfo.of(WorkerDied("wave")).error()
    assert isinstance(error, WorkerDied)
    assert error.line() == "[stage_failed:wave] the stage's worker died"
    assert type(from_line(error.line())) is StageFailed
    assert type(ErrorInfo.of(StageFailed("boom", "wave")).error()) is StageFailed


def test_records_between_processes():
    info = ErrorInfo.of(TooBusy("full", "queue"), "wave")
    assert info == ErrorInfo("too_busy", "full", "queue")
    assert isinstance(info.error(), TooBusy)
    assert ErrorInfo.of(TooBusy("full"), "wave").where == "wave"
    foreign = ErrorInfo.of(ZeroDivisionError("x" * 9_000), "wave").error()
    assert isinstance(foreign, StageFailed)
    assert foreign.where == "wave"
    assert foreign.message.startswith("ZeroDivisionError: xxx")
    assert len(foreign.message) <= errors.MAX_MESSAGE_CHARS
    assert isinstance(ErrorInfo("of the future", "m").error(), Internal)
