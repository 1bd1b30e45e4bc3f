# SPDX-License-Identifier: Apache-2.0
"""Spans to a collector: none without one, and a dead one holds nobody up."""

from __future__ import annotations

import socket
import time

import pytest

from triton_omni.backends.telemetry.traces import CLOSE_S, ENDPOINTS, traces

SDK_GIVES_UP_S = 7.0  # it tries a dead collector for longer than this


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
        began_s = time.monotonic()
        made.close()
        assert time.monotonic() - began_s < CLOSE_S + SDK_GIVES_UP_S / 2
