# SPDX-License-Identifier: Apache-2.0
"""The proxy's border: keys, sizes, unknown routes, models, health, metrics, request ids."""

from __future__ import annotations

import socket

import httpx
import openai
import pytest

from tests.kit.fake_backend import FakeBackend
from tests.kit.proxy_server import RunningProxy, running_proxy
from triton_omni.openai.http.settings import BodyLimits, Settings

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}


def test_models(sdk: openai.OpenAI) -> None:
    models = sdk.models.list().data
    assert [m.id for m in models] == ["fake", "painter"]
    entry = sdk.models.retrieve("fake")
    assert (entry.object, entry.owned_by) == ("model", "triton-omni")
    assert entry.model_extra == {
        "voices": ["sine"], "sample_rate": 24_000, "ready": True, "operations": ["chat", "completion", "speech"],
        "endpoints": ["/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/audio/speech"],
        "media": ["text", "audio", "image", "video"],
    }  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other")


def test_aliases(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings({"gpt": "fake"})) as proxy, proxy.sdk() as sdk:
        assert [m.id for m in sdk.models.list().data] == ["gpt"]
        answer = sdk.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
        assert answer.model == "gpt" and backend.seen[0].pipeline == "fake"
        with pytest.raises(openai.NotFoundError):
            sdk.models.retrieve("fake")


def test_health_tells_the_truth(proxy: RunningProxy, backend: FakeBackend) -> None:
    answer = httpx.get(f"{proxy.root}/health")
    assert answer.status_code == 200 and answer.json()["status"] == "ok"
    assert answer.json()["pipelines"]["fake"]["stages"]["words"]["state"] == "ready"
    backend.degraded = True
    answer = httpx.get(f"{proxy.root}/health")
    assert answer.status_code == 200 and answer.json()["status"] == "degraded", "text goes on where speech does not"
    backend.not_ready = {"painter": "restarting"}
    answer = httpx.get(f"{proxy.root}/health")
    assert answer.status_code == 503 and answer.json()["status"] == "unavailable" and answer.headers["retry-after"]
    assert answer.json()["pipelines"]["fake"]["ready"] is True
    assert answer.json()["pipelines"]["painter"]["stages"]["words"]["state"] == "restarting"


def test_health_of_a_dead_server(backend: FakeBackend) -> None:
    backend.unreachable = True
    with running_proxy(backend) as proxy:
        answer = httpx.get(f"{proxy.root}/health")
        assert answer.status_code == 503 and "failed to connect" in answer.json()["error"]
        answer = httpx.post(f"{proxy.root}/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


def test_key(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(api_key="secret")) as proxy:
        for key in ("wrong", "sécret"):
            answer = httpx.get(f"{proxy.root}/v1/models", headers={"authorization": f"Bearer {key}".encode()})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{proxy.root}/v1/models").status_code == 401
        with pytest.raises(openai.AuthenticationError), proxy.sdk(api_key="wrong") as sdk:
            sdk.models.list()
        with proxy.sdk(api_key="secret") as sdk:
            assert sdk.models.list().data
        assert httpx.get(f"{proxy.root}/health").status_code == 200, "probes have no key"


def test_size(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(limits=BodyLimits(body_bytes=1000))) as proxy:
        url = f"{proxy.root}/v1/chat/completions"
        announced = httpx.post(url, content=b"x" * 1001)
        assert announced.status_code == 413 and announced.json()["error"]["code"] == "content_too_large"
        for chunks in ([b"x" * 600, b"x" * 600], [b"x" * 600] * 3):
            assert httpx.post(url, content=iter(chunks)).status_code == 413
        assert httpx.post(url, json=CHAT).status_code == 200


def test_a_client_that_sends_all_before_it_listens_gets_its_413(backend: FakeBackend) -> None:
    body = b"x" * (16 << 20)  # more than the kernel's buffers hold: unread, it would be answered by a reset
    with running_proxy(backend, Settings(limits=BodyLimits(body_bytes=8 << 20))) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as patient:
            patient.sendall(head.replace("host: x", "host: x\r\nexpect: 100-continue").encode())
            answer = b""
            while part := patient.recv(1 << 16):  # to the end of the connection: no body may come, or the next request
                answer += part
            assert answer.startswith(b"HTTP/1.1 413 "), "who asks first need not send"


def test_unknown_routes_and_methods(proxy: RunningProxy) -> None:
    missing = httpx.get(f"{proxy.root}/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    wrong = httpx.get(f"{proxy.root}/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


def test_every_answer_has_its_own_request_id(proxy: RunningProxy, backend: FakeBackend) -> None:
    ids = [httpx.get(f"{proxy.root}{path}").headers["x-request-id"] for path in ("/health", "/nothing", "/v1/models")]
    assert len(set(ids)) == 3
    answer = httpx.post(f"{proxy.root}/v1/chat/completions", json=CHAT)
    assert answer.headers["x-request-id"] == backend.seen[0].request_id


def test_metrics(proxy: RunningProxy, backend: FakeBackend) -> None:
    httpx.post(f"{proxy.root}/v1/chat/completions", json=CHAT)
    httpx.post(f"{proxy.root}/v1/chat/completions", json={})
    httpx.get(f"{proxy.root}/any/where")
    page = httpx.get(f"{proxy.root}/metrics").text
    assert 'omni_proxy_requests_total{route="/v1/chat/completions",status="200"} 1' in page
    assert 'omni_proxy_requests_total{route="/v1/chat/completions",status="400"} 1' in page
    assert 'omni_proxy_requests_total{route="other",status="404"} 1' in page
    assert 'omni_proxy_requests_in_flight{route="/v1/chat/completions"} 0' in page
    assert 'omni_proxy_first_byte_seconds_count{route="/v1/chat/completions"} 2' in page


def test_tritons_page_is_below_ours(proxy: RunningProxy, backend: FakeBackend) -> None:
    """The inner proxy's page stands in for Triton's: any page will do."""
    with running_proxy(backend, Settings(metrics_url=f"{proxy.root}/metrics")) as outer:
        page = httpx.get(f"{outer.root}/metrics").text
        assert page.count("# TYPE omni_proxy_requests_total counter") == 2
    with running_proxy(backend, Settings(metrics_url="http://127.0.0.1:1/metrics")) as outer:
        assert "could not be read" in httpx.get(f"{outer.root}/metrics").text


def test_a_client_that_leaves_while_sending(proxy: RunningProxy, backend: FakeBackend) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert httpx.post(f"{proxy.root}/v1/chat/completions", json=CHAT).status_code == 200
    assert len(backend.seen) == 1


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"\xed\xa0\x80"', b"1e999", b"-Infinity"])
def test_json_that_could_not_be_sent_on(proxy: RunningProxy, backend: FakeBackend, text: bytes) -> None:
    body = b'{"model": "fake", "messages": [{"role": "user", "content": "x"}], "stages": {"words": {"a": %s}}}' % text
    answer = httpx.post(f"{proxy.root}/v1/chat/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert not backend.seen


def test_only_a_trace_context_goes_on(proxy: RunningProxy, backend: FakeBackend) -> None:
    good = f"00-{'a' * 32}-{'b' * 16}-01"
    for sent in (good, "", "garbage", f"{good}\xff", "x" * 40_000):
        headers = httpx.Headers({"traceparent": sent}, encoding="latin-1")
        assert httpx.post(f"{proxy.root}/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    assert [call.traceparent for call in backend.seen] == [good, "", "", "", ""]
