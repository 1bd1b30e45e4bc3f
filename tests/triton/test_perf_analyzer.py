# SPDX-License-Identifier: Apache-2.0
"""The real perf_analyzer, streaming, against the toy pipeline: clean at every concurrency, with shared memory too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf.harness import Analysis, Server, analyze, bare_server, request_only
from perf.measures import trace_of
from tests.kit.load_generator import body
from tests.kit.triton_server import RunningServer

pytestmark = pytest.mark.triton

TOKENS = 5


def run(server: RunningServer | Server, concurrency: int, count: int, *flags: str, model: str = "toy") -> Analysis:
    inputs = {"request": json.dumps(body(TOKENS))}
    load = ["--concurrency-range", str(concurrency), "--request-count", str(count)]
    analysis = analyze(server.grpc, model, inputs, [*load, *flags], timeout_s=120)
    assert analysis.exit_code == 0, analysis.text
    assert len(analysis.requests) == count, analysis.text
    return analysis


@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
def test_streams_are_clean(toy: RunningServer, concurrency: int) -> None:
    analysis = run(toy, concurrency, max(4, 2 * concurrency))
    for one in map(trace_of, analysis.requests):
        assert one.completed
        assert len(one.of("text")) == len(one.of("audio")) == TOKENS


def test_system_shared_memory_for_inputs_and_outputs(tmp_path: Path) -> None:
    with bare_server([request_only("toy", tmp_path)]) as server:
        analysis = run(server, 4, 8, "--shared-memory", "system", "--output-shared-memory-size", str(1 << 16))
    assert {len(r["response_timestamps"]) for r in analysis.requests} == {2 * TOKENS + 1}


def test_one_stage_called_directly(toy: RunningServer) -> None:
    analysis = run(toy, 4, 8, model="toy_tokens")
    assert {len(r["response_timestamps"]) for r in analysis.requests} == {TOKENS + 1}
