# SPDX-License-Identifier: Apache-2.0
"""JSON lines: one object per record, with the facts it was given."""

from __future__ import annotations

import io
import json
import logging

import pytest

from triton_omni.backends.core.errors import StageFailed
from triton_omni.backends.telemetry import logs


@pytest.fixture
def written(monkeypatch):
    """A logger in JSON, and what it wrote."""
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "json")
    handler = logs.stderr_handler("%(message)s", pipeline="toy", stage="wave")
    handler.stream = io.StringIO()
    logger = logging.getLogger("triton_omni.test")
    logger.addHandler(handler)
    yield logger, lambda: [json.loads(line) for line in handler.stream.getvalue().splitlines()]
    logger.removeHandler(handler)


def test_a_record_is_one_object_with_its_facts(written):
    logger, lines = written
    error = StageFailed("no\nway", "wave")
    logger.warning("request %s failed", "r-1", extra=logs.about("r-1", error))
    [line] = lines()
    assert line.pop("time").endswith("Z")
    assert line.pop("pid") > 0
    assert line == {
        "level": "warning", "logger": "triton_omni.test", "pipeline": "toy", "stage": "wave",
        "message": "request r-1 failed", "request_id": "r-1", "code": "stage_failed", "where": "wave",
    }  # fmt: skip


def test_a_traceback_stays_on_its_line(written):
    logger, lines = written
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("odd\nid: %s", "\x00ü")
    [line] = lines()
    assert line["message"] == "odd\nid: \x00ü"
    assert "ValueError: two" in line["exception"]


def test_text_is_the_default_and_nonsense_is_refused(monkeypatch):
    monkeypatch.delenv(logs.FORMAT_VARIABLE, raising=False)
    assert not logs.is_json()
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "xml")
    with pytest.raises(ValueError, match="text or json"):
        logs.is_json()
