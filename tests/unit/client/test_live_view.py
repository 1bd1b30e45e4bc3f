# SPDX-License-Identifier: Apache-2.0
"""The live view: rates and latencies from metrics, and /v1/events for clients and for operators."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.kit.fake_backend import FakeBackend
from tests.kit.proxy_server import running_proxy
from triton_omni.live_view import LiveView, MetricsPage, quantile
from triton_omni.openai.http.access import ApiKey, digest
from triton_omni.openai.http.settings import Settings
from triton_omni.top import view, waterfall

INF = float("inf")


def page(tokens: float = 0, steps: float = 0, runs: float = 0, first: tuple[float, float, float] = (0, 0, 0)) -> str:
    """A page as Triton prints it; `first`: requests with first text below 0.1 s, below 1 s, and all."""
    buckets = "".join(
        f'omni_first_output_seconds_bucket{{pipeline="fake",output="text",le="{bound}"}} {count}\n'
        for bound, count in zip(("0.1", "1", "+Inf"), first, strict=True)
    )
    return (
        f'omni_usage_total{{pipeline="fake",kind="completion_tokens"}} {tokens}\n'
        f'omni_usage_total{{pipeline="fake",kind="prompt_tokens"}} {tokens * 9}\n'
        f'omni_stage_steps_total{{pipeline="fake",stage="words"}} {steps}\n'
        f'omni_stage_step_runs_total{{pipeline="fake",stage="words"}} {runs}\n'
        'omni_stage_runs_live{pipeline="fake",stage="words",worker="words-0"} 3\n'
        'omni_stage_runs_live{pipeline="fake",stage="words",worker="words-1"} 1\n'
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 1048576\nnv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 4194304\n'
        f'# HELP nothing\nnv_inference_request_success{{model="fake",version="1"}} 7\n{buckets}'
    )


@pytest.mark.parametrize(
    ("buckets", "q", "value"),
    [
        ({}, 0.5, None),
        ({0.1: 0, 1.0: 0, INF: 0}, 0.5, None),
        ({0.1: 10, 1.0: 10, INF: 10}, 0.5, 0.05),
        ({0.1: 0, 1.0: 10, INF: 10}, 0.5, 0.55),
        ({0.1: 5, 1.0: 10, INF: 10}, 0.95, 0.91),
        ({0.1: 0, 1.0: 0, INF: 10}, 0.5, 1.0),
    ],
)
def test_quantiles(buckets: dict[float, float], q: float, value: float | None) -> None:
    assert quantile(buckets, q) == (value if value is None else pytest.approx(value))


def test_rates_are_differences_over_seconds() -> None:
    live = LiveView()
    assert live.pipeline("fake")["tokens_per_s"] is None, "nothing is known yet"
    live.add(100.0, MetricsPage(page(10, 100, 150)))
    assert live.pipeline("fake")["tokens_per_s"] is None, "one reading has no rate"
    live.add(101.0, MetricsPage(""))  # the metrics service did not answer
    live.add(102.0, MetricsPage(page(30, 110, 190)))
    assert live.pipeline("fake")["tokens_per_s"] == 10.0
    stage = live.stage("fake", "words")
    assert (stage["steps"], stage["steps_per_s"], stage["runs_per_step"]) == (110, 5.0, 4.0)
    assert stage["workers"] == {"words-0": 3, "words-1": 1}
    live.add(103.0, MetricsPage(page(0)))
    assert live.pipeline("fake")["tokens_per_s"] == 0, "a server that started again counts from zero"
    assert live.pipeline("other")["tokens_per_s"] == 0 and live.stage("other", "x")["runs_per_step"] is None
    assert live.gpus() == [{"gpu": "GPU-1", "used_bytes": 1048576.0, "total_bytes": 4194304.0}]


def test_latencies_are_those_of_the_last_minute() -> None:
    live = LiveView()
    live.add(0.0, MetricsPage(page(first=(100, 100, 100))))
    assert live.pipeline("fake")["first_output_s"]["text"]["p50"] == pytest.approx(0.05), "all there is"
    live.add(30.0, MetricsPage(page(first=(100, 110, 110))))
    assert live.pipeline("fake")["first_output_s"]["text"]["p50"] == pytest.approx(0.55), "not the 100 before"
    live.add(70.0, MetricsPage(page(first=(110, 120, 120))))
    live.add(95.0, MetricsPage(page(first=(120, 130, 130))))
    assert live.pipeline("fake")["first_output_s"]["text"]["p95"] == pytest.approx(0.095), "of 10 below 0.1 s"


def test_a_screen_for_people() -> None:
    live = LiveView()
    live.add(0.0, MetricsPage(page(10, 100, 150, (1, 1, 1))))
    live.add(1.0, MetricsPage(page(30, 110, 190, (11, 11, 11))))
    stage = {"state": "ready", "live": 4, "instances": 2, "ready": 2, "restarts": 0, **live.stage("fake", "words")}
    state = {
        "state": "ready",
        "live": 4,
        "queued": 1,
        "stages": {"words": stage},
        "requests": [],
        **live.pipeline("fake"),
    }
    shown = view({"time_s": 0.0, "pipelines": {"fake": state, "gone": {"error": "no answer"}}, "gpus": live.gpus()})
    for part in ("GPU-1: 1 of 4 MiB", "20.0 tokens/s", "first text", "p50 0.050 s", "runs per step 4.0",
                 "workers: words-0 3, words-1 1", "gone: no answer"):  # fmt: skip
        assert part in shown, part


# --- /v1/events ---


class Metrics(BaseHTTPRequestHandler):
    """A metrics service; counts how often it is read."""

    reads = 0

    def do_GET(self) -> None:
        type(self).reads += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page(10.0 * self.reads, 4.0 * self.reads, 8.0 * self.reads).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def metrics_url() -> Iterator[str]:
    Metrics.reads = 0
    server = HTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    thread.join(10)
    server.server_close()


def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.json"
    entries = [
        ApiKey(id=name, sha256=digest(name.encode()), operator=name == "root", models=models)
        for name, models in (("one", ("fake",)), ("root", None))
    ]
    file.write_bytes(msgspec.json.encode({"keys": entries}))
    return file


def views(url: str, key: str, count: int) -> list[dict[str, Any]]:
    """The first views of a stream."""
    found = list[dict[str, Any]]()
    with httpx.stream("GET", f"{url}/v1/events", headers={"authorization": f"Bearer {key}"}, timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                return found
    raise AssertionError("the stream ended")


def test_events_are_views_without_ids_for_all_and_with_requests_for_operators(tmp_path: Path, metrics_url: str) -> None:
    backend = FakeBackend(hold_after=1)
    with running_proxy(backend, Settings(api_keys=keys(tmp_path), metrics_url=metrics_url)) as proxy:
        body = {"model": "fake", "messages": [{"role": "user", "content": "my secret"}], "stream": True}
        headers = {"authorization": "Bearer one", "x-request-id": "my-request"}
        with httpx.stream("POST", f"{proxy.root}/v1/chat/completions", json=body, headers=headers):
            assert backend.seen[0].begun.wait(10)
            first, second = views(proxy.root, "one", 2)
            assert set(first["pipelines"]) == {"fake"}, "only models that the key may use"
            text = json.dumps([first, second])
            assert "my-request" not in text and "secret" not in text and "words-0" not in text
            fake = second["pipelines"]["fake"]
            assert (fake["state"], fake["stages"]["words"]["runs_per_step"]) == ("ready", 2.0)
            assert fake["tokens_per_s"] > 0 and second["gpus"][0]["used_bytes"] == 1048576.0
            [full] = views(proxy.root, "root", 1)
            assert set(full["pipelines"]) == {"fake", "painter"}
            assert [request["id"] for request in full["pipelines"]["fake"]["requests"]] == ["my-request"]
            assert full["pipelines"]["fake"]["stages"]["words"]["workers"] == {"words-0": 3, "words-1": 1}
            assert "secret" not in json.dumps(full)
        assert httpx.get(f"{proxy.root}/v1/events").status_code == 401


def test_all_who_watch_share_one_reading(metrics_url: str) -> None:
    with running_proxy(FakeBackend(), Settings(metrics_url=metrics_url)) as proxy:
        for _ in range(5):
            assert httpx.get(f"{proxy.root}/v1/events?once=true").json()["pipelines"]["fake"]["state"] == "ready"
        assert 1 <= Metrics.reads <= 3, "five views within moments"


def test_a_server_that_does_not_answer_is_an_error_in_the_view() -> None:
    with running_proxy(FakeBackend(unreachable=True)) as proxy:
        seen = httpx.get(f"{proxy.root}/v1/events?once=true").json()
        assert seen["pipelines"] == {} and "failed to connect" in seen["error"]


def test_a_proxy_without_the_operators_key_lists_no_requests() -> None:
    with running_proxy(FakeBackend(knows_operator=False)) as proxy:
        assert httpx.get(f"{proxy.root}/v1/events?once=true").json()["pipelines"]["fake"]["requests"] == []


def test_waterfalls_are_for_operators(tmp_path: Path) -> None:
    with running_proxy(FakeBackend(), Settings(api_keys=keys(tmp_path))) as proxy:
        headers = {"authorization": "Bearer one", "x-request-id": "a/b"}
        body = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
        assert httpx.post(f"{proxy.root}/v1/chat/completions", json=body, headers=headers).status_code == 200
        root = {"authorization": "Bearer root"}
        [trace] = httpx.get(f"{proxy.root}/v1/events/a/b", headers=root).json()["traces"]
        assert (trace["id"], trace["pipeline"]) == ("a/b", "fake")
        for request_id, auth, status, code in (
            ("a/b", {"authorization": "Bearer one"}, 403, "operator_only"), ("none", root, 404, "request_not_found"),
        ):  # fmt: skip
            answer = httpx.get(f"{proxy.root}/v1/events/{request_id}", headers=auth)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_waterfall_for_people() -> None:
    spans = [
        {"name": "queue", "start_s": 0.0, "end_s": 0.5},
        {"name": "words", "start_s": 0.5, "first_s": 1.0, "end_s": 2.0, "outcome": "finished"},
    ]
    trace = {"pipeline": "fake", "operation": "chat", "id": "x\n", "outcome": "completed", "total_s": 2.0, "ended_s": 7}
    head, queue, words = waterfall({**trace, "spans": spans}).splitlines()
    assert head == "fake chat 'x\\n': completed after 2.000 s, 7 s ago"
    assert queue.count("=") == 13 and "0.000 -    0.500 s" in queue
    assert words.index("|") - words.index("=") == 12 and words.endswith("finished")
