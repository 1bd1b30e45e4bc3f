# SPDX-License-Identifier: Apache-2.0
"""Spans to a collector: none without one, and a dead one delays no exit."""

from __future__ import annotations

import socket
import threading

import pytest

from triton_omni.backends.telemetry.traces import ENDPOINTS, FLUSH_THREAD, traces


@pytest.fixture(autouse=True)
def no_collector(monkeypatch):
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)


def test_without_a_collector_there_are_no_traces():
    assert traces("toy") is None


def test_a_dead_collector_does_not_hold_up_the_end(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        monkeypatch.setenv(ENDPOINTS[0], f"http://127.0.0.1:{silent.getsockname()[1]}")
        made = traces("toy")
        assert made is not None
        made.end(made.begin("a request", ""), {})
        made.close()
        assert [thread.name for thread in threading.enumerate() if thread.name == FLUSH_THREAD] == [FLUSH_THREAD], (
            "close has returned while the collector still does not answer"
        )
