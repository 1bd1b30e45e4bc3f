# SPDX-License-Identifier: Apache-2.0
"""One request is one trace, from the client's own span through the proxy to every stage, at a real OTLP receiver."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import httpx
import pytest

from tests.kit.otlp_collector import Collector, Span, collector
from tests.kit.server_calls import generate
from tests.kit.triton_server import TOY_REPOSITORY, RunningServer, running_server, wait_for

pytestmark = pytest.mark.triton
EXPORT_S = 10.0
STAGES = {"toy/tokens", "toy/frames", "toy/wave"}
FAST = {"OTEL_BSP_SCHEDULE_DELAY": "100"}  # milliseconds between two exports


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[RunningServer, Collector]]:
    """A supervised server with proxy that exports to a collector."""
    with collector() as receiver:
        variables = FAST | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
        with running_server([TOY_REPOSITORY], supervised=True, proxy=True, variables=variables) as server:
            yield server, receiver


def parent() -> tuple[str, str, str]:
    """(traceparent, trace, span) of a caller that traces."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace}-{span}-01", trace, span


def spans_of(receiver: Collector, trace: str, root: str) -> dict[str, Span]:
    """The spans of a trace by name, once its outermost of ours has come."""
    wait_for(lambda: any(s.name == root for s in receiver.of(trace)), EXPORT_S, f"{root} exported")
    wait_for(lambda: any(s.name == "toy" for s in receiver.of(trace)), EXPORT_S, "the request exported")
    spans = receiver.of(trace)
    assert len({span.name for span in spans}) == len(spans), [span.name for span in spans]
    return {span.name: span for span in spans}


def test_a_chat_through_the_proxy_is_one_trace(traced: tuple[RunningServer, Collector]) -> None:
    server, receiver = traced
    context, trace, caller = parent()
    body = {"model": "toy", "messages": [{"role": "user", "content": "secret words"}], "max_tokens": 4,
            "modalities": ["text", "audio"], "audio": {"voice": "sine", "format": "pcm16"}, "stream": True}  # fmt: skip
    answer = httpx.post(f"{server.openai}/chat/completions", json=body, headers={"traceparent": context}, timeout=30)
    assert answer.status_code == 200, answer.text
    spans = spans_of(receiver, trace, "POST /v1/chat/completions")
    proxy, request = spans["POST /v1/chat/completions"], spans["toy"]
    assert set(spans) == STAGES | {"POST /v1/chat/completions", "toy", "queue"}
    assert (proxy.parent, proxy.service) == (caller, "triton-omni-proxy")
    assert (request.parent, request.service) == (proxy.id, "toy")
    assert {spans[name].parent for name in (*STAGES, "queue")} == {request.id}
    assert proxy.attributes["http.response.status_code"] == 200
    assert (
        proxy.attributes["omni.request_id"] == request.attributes["omni.request_id"] == answer.headers["x-request-id"]
    )
    assert request.events == ["first text", "first audio"]
    assert request.attributes["omni.usage.completion_tokens"] == 4
    wave = spans["toy/wave"]
    assert wave.attributes["omni.edge.frames.chunks"] >= 4
    assert wave.attributes["omni.edge.frames.bytes"] == 4 * 2 * 8 * 4
    assert wave.attributes["omni.edge.frames.transfer_s"] > 0
    assert wave.events == ["first output"]
    for span in spans.values():
        assert not span.failed
        assert proxy.start_s <= span.start_s <= span.end_s
        assert span is proxy or span.end_s <= request.end_s + 0.1
    assert "secret" not in repr(receiver.spans)


def test_a_failure_is_the_stages_and_the_requests(traced: tuple[RunningServer, Collector]) -> None:
    server, receiver = traced
    context, trace, caller = parent()
    _, answer = generate(
        server, text_input="x", max_tokens=5, modalities="audio", traceparent=context,
        stages=json.dumps({"frames": {"fail_after": 2}}),
    )  # fmt: skip
    assert answer["error"] == "[stage_failed:frames] failed on request"
    spans = spans_of(receiver, trace, "toy")
    assert spans["toy"].parent == caller
    assert set(spans) == STAGES | {"toy", "queue"}
    for name in ("toy", "toy/frames"):
        assert (spans[name].failed, spans[name].status) == (True, "[stage_failed:frames] failed on request")
    assert spans["toy"].attributes["omni.outcome"] == "stage_failed"
    assert not spans["queue"].failed


def test_tritons_own_spans_stand_between_when_it_traces() -> None:
    """The context that Triton hands to the model is that of its own span, in the caller's trace."""
    with collector() as receiver:
        flags = ["mode=opentelemetry", f"opentelemetry,url={receiver.url}/v1/traces", "rate=1", "level=TIMESTAMPS"]
        variables = FAST | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{receiver.url}/v1/traces"}
        trace_flags = [f"--trace-config={flag}" for flag in flags]
        with running_server([TOY_REPOSITORY], flags=trace_flags, variables=variables) as server:
            context, trace, caller = parent()
            answer = httpx.post(
                f"http://{server.http}/v2/models/toy/generate",
                json={"text_input": "x"},
                headers={"traceparent": context},
            )
            assert answer.status_code == 200
            request = spans_of(receiver, trace, "toy")["toy"]
            assert request.parent not in (caller, "")


def test_without_a_collector_nothing_of_it_is_loaded(toy: RunningServer) -> None:
    status, _ = generate(toy, text_input="x", traceparent=parent()[0])
    assert status == 200
    with open(f"/proc/{toy.instance('toy').pid}/maps") as maps:
        assert "google/_upb" not in maps.read()  # the one compiled part that the exporter brings
