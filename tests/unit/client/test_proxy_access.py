# SPDX-License-Identifier: Apache-2.0
"""Who may use the proxy: keys and their limits, hosts and origins, and malformed HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.kit.fake_backend import RATE_HZ, SAMPLES, FakeBackend
from tests.kit.proxy_server import RunningProxy, proxy_process, running_proxy
from tests.kit.tcp_ends import certificates
from triton_omni.backends.wire import Deadlines, GenerateRequest
from triton_omni.openai.__main__ import arguments, settings_of
from triton_omni.openai.http.access import Access, ApiKey, KeyFile, KeyUse, digest, new_key, read_keys
from triton_omni.openai.http.app import make_app
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.settings import Settings

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}


def entry(key: str, **limits: Any) -> ApiKey:
    return ApiKey(id=f"id of {key}", sha256=digest(key.encode()), **limits)


def write(file: Path, *keys: ApiKey) -> Settings:
    file.write_bytes(msgspec.json.encode(KeyFile(keys)))
    return Settings(api_keys=file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def chat(proxy: RunningProxy, key: str, **more: Any) -> httpx.Response:
    url = f"{proxy.root}/v1/chat/completions"
    return httpx.post(url, json={**CHAT, **more}, headers={"authorization": f"Bearer {key}".encode()})


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


# --- keys ---


def test_keys_of_a_file(backend: FakeBackend, file: Path) -> None:
    with running_proxy(backend, write(file, entry("one"), entry("zwéi", models=("painter",)))) as proxy:
        assert chat(proxy, "one").status_code == 200
        assert error_of(chat(proxy, "zwéi")) == (403, "model_not_allowed", "model")
        for wrong in ("two", "one\xa0"):
            assert error_of(chat(proxy, wrong)) == (401, "invalid_api_key", None)
        assert httpx.post(f"{proxy.root}/v1/chat/completions", json=CHAT).status_code == 401
        headers = {"authorization": "Bearer zwéi".encode()}
        listed = httpx.get(f"{proxy.root}/v1/models", headers=headers).json()["data"]
        assert [model["id"] for model in listed] == ["painter"]
        for path in ("/v1/models/fake", "/v1/audio/voices?model=fake"):
            assert error_of(httpx.get(f"{proxy.root}{path}", headers=headers)) == (403, "model_not_allowed", "model")
    assert len(backend.seen) == 1


@pytest.mark.parametrize("route", ["chat", "edit", "transcription", "speech"])
def test_media_are_not_read_for_a_model_that_the_key_does_not_allow(
    backend: FakeBackend, file: Path, route: str
) -> None:
    """What is sent as media is none: were it read, the answer would be a 400 about it."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm9uZQ=="}}
    form: dict[str, Any] = {"data": {"model": "fake", "prompt": "x"}, "files": {"image": b"none"}}
    sent: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("chat/completions", {"json": {"model": "fake", "messages": [{"role": "user", "content": [image]}]}}),
        "edit": ("images/edits", form),
        "speech": ("audio/speech", {"json": {"model": "fake", "input": "x", "ref_audio": "bm9uZQ=="}}),
        "transcription": ("audio/transcriptions", {"data": {"model": "fake"}, "files": {"file": b"none"}}),
    }
    path, body = sent[route]
    with running_proxy(backend, write(file, entry("one", models=("painter",)))) as proxy:
        answer = httpx.post(f"{proxy.root}/v1/{path}", headers={"authorization": "Bearer one"}, **body)
    assert error_of(answer) == (403, "model_not_allowed", "model")


def test_caps_of_priority_and_deadline(backend: FakeBackend, file: Path) -> None:
    settings = write(file, entry("one", max_total_s=30.0), entry("two", max_priority=50))
    with running_proxy(backend, settings) as proxy:
        assert error_of(chat(proxy, "one", priority=1)) == (400, "invalid_value", "priority")
        assert chat(proxy, "two", priority=50).status_code == 200
        for total_s in (0, 31):
            refused = chat(proxy, "one", deadlines={"total_s": total_s})
            assert error_of(refused) == (400, "invalid_value", "deadlines.total_s")
        assert chat(proxy, "one", deadlines={"total_s": 5}).status_code == 200
        assert chat(proxy, "one").status_code == 200
    assert [call.request.deadlines.total_s for call in backend.seen] == [None, 5, 30]


def test_servers_without_a_key_file_have_caps_too(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(max_priority=0, max_total_s=9.0)) as proxy:
        assert error_of(chat(proxy, "any", priority=100)) == (400, "invalid_value", "priority")
        assert error_of(chat(proxy, "any", deadlines={"total_s": 0})) == (400, "invalid_value", "deadlines.total_s")
        assert chat(proxy, "any").status_code == 200


def test_requests_per_minute(backend: FakeBackend, file: Path) -> None:
    with running_proxy(backend, write(file, entry("one", requests_per_min=2), entry("two"))) as proxy:
        answers = [chat(proxy, "one") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        remaining = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert (answers[0].headers["x-ratelimit-limit-requests"], remaining) == ("2", ["1", "0", "0"])
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert error_of(answers[2])[1] == "rate_limit_exceeded"
        assert chat(proxy, "two").status_code == 200, "a key of its own"


def test_concurrent_requests(backend: FakeBackend, file: Path) -> None:
    backend.hold_after = 1
    with running_proxy(backend, write(file, entry("one", concurrent=1))) as proxy:
        body = {**CHAT, "stream": True}
        with httpx.stream(
            "POST", f"{proxy.root}/v1/chat/completions", json=body, headers={"authorization": "Bearer one"}
        ):
            assert error_of(chat(proxy, "one"))[:2] == (429, "rate_limit_exceeded")
        backend.hold_after = None
        assert backend.seen[0].over.wait(20)
        assert chat(proxy, "one").status_code == 200, "the first one has left"


def test_seconds_of_audio(backend: FakeBackend, file: Path) -> None:
    spoken_s = 3 * SAMPLES / RATE_HZ
    body = {"model": "fake", "input": "one two three", "voice": "sine"}
    with running_proxy(backend, write(file, entry("one", audio_s_per_min=spoken_s * 1.5))) as proxy:
        url, headers = f"{proxy.root}/v1/audio/speech", {"authorization": "Bearer one"}
        statuses = [httpx.post(url, json=body, headers=headers).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]


def test_allowances_refill() -> None:
    now = [0.0]
    use = KeyUse(entry("one", requests_per_min=60), clock=lambda: now[0])
    for _ in range(60):
        with use.request():
            pass
    with pytest.raises(ApiError) as caught, use.request():
        pass
    assert caught.value.retry_after_s == pytest.approx(1.0)
    now[0] = 1.0
    with use.request():
        pass
    now[0] = 1e6
    assert use.requests.level == 60


def test_limits_do_not_change_other_parts_of_a_request() -> None:
    request = GenerateRequest(input="x", deadlines=Deadlines(stall_s=3))
    assert KeyUse(entry("one")).limited("m", request) is request
    limited = KeyUse(entry("one", max_total_s=9.0)).limited("m", request)
    assert limited == msgspec.structs.replace(request, deadlines=Deadlines(stall_s=3, total_s=9))


def test_a_file_is_read_again(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    access = Access(write(file, entry("one", requests_per_min=9), entry("two", requests_per_min=9)))
    before = access._uses[digest(b"one")]
    before.requests.spend(5)
    with before.request():
        write(file, entry("one", requests_per_min=9), entry("three"))
        access.reload()
        assert set(access._uses) == {digest(b"one"), digest(b"three")}
        assert access._uses[digest(b"one")] is before, "what it has used is not forgotten"
        write(file, entry("one", requests_per_min=3))
        access.reload()
        assert access._uses[digest(b"one")].live == 1
    assert access._uses[digest(b"one")].live == 0, "a request that began under the old limits ends under the new"
    file.write_text("{")
    access.reload()
    assert set(access._uses) == {digest(b"one")} and "not reloaded" in caplog.text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "keys.json"), ('{"keys": [{"id": "a", "sha256": "x"}]}', "sha256"),
        ('{"keys": [{"id": "a", "sha256": "%s", "rpm": 1}]}' % ("0" * 64), "rpm"),
        ('{"keys": [%s, %s]}' % ((json.dumps({"id": "a", "sha256": "0" * 64}),) * 2), "same id"),
    ],
)  # fmt: skip
def test_files_with_errors(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_keys(file)


def test_new_keys_are_stored_as_digests_only() -> None:
    key, stored = new_key("me")
    assert len(key) > 40 and key not in str(stored) and digest(key.encode()) == stored.sha256
    assert new_key("me")[0] != key


def test_health_of_a_server_for_everyone_has_no_details(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(is_public=True)) as proxy:
        assert httpx.get(f"{proxy.root}/health").json() == {"status": "ok"}
    assert settings("--host", "0.0.0.0", "--insecure").is_public and not settings().is_public


def test_tls(tmp_path: Path) -> None:
    cert, key, _ = map(str, certificates())
    with proxy_process("--triton", "127.0.0.1:1", "--tls-cert", cert, "--tls-key", key) as proxy:
        trusting = ssl.create_default_context(cafile=cert)
        trusting.check_hostname = False
        answer = httpx.get(f"https://127.0.0.1:{proxy.port}/health", verify=trusting)
        assert answer.status_code == 503 and answer.json()["status"] == "unavailable"
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"https://127.0.0.1:{proxy.port}/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{proxy.port}/health")
    none = tmp_path / "none.pem"
    none.write_text("none")
    refused = {
        ("--tls-key", key): "--tls-key needs --tls-cert",
        ("--tls-cert", cert): "no certificate with its private key",
        ("--tls-cert", str(none), "--tls-key", key): "no certificate with its private key",
        ("--tls-cert", str(tmp_path / "missing.pem")): "missing.pem cannot be read",
    }
    for words, says in refused.items():
        with pytest.raises(ValueError, match=says):
            settings(*words)


def test_health_has_details_for_operators_only(backend: FakeBackend, file: Path) -> None:
    with running_proxy(backend, write(file, entry("one"), entry("root", operator=True))) as proxy:
        for headers in ({}, {"authorization": "Bearer one"}, {"authorization": "Bearer wrong"}):
            assert httpx.get(f"{proxy.root}/health", headers=headers).json() == {"status": "ok"}
        full = httpx.get(f"{proxy.root}/health", headers={"authorization": "Bearer root"}).json()
        assert full["pipelines"]["fake"]["ready"] is True
        backend.unreachable = True
        gone = httpx.get(f"{proxy.root}/health")
        assert (gone.status_code, gone.json()) == (503, {"status": "unavailable"})


# --- command line ---


def settings(*words: str) -> Settings:
    return settings_of(arguments().parse_args(list(words)))


def test_other_addresses_need_a_key(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.delenv("TRITON_OMNI_API_KEY", raising=False)
    with pytest.raises(ValueError, match="--insecure"):
        settings("--host", "0.0.0.0")
    write(file, entry("one"))
    for words in (["--api-key", "k"], ["--api-keys", str(file)], ["--insecure"]):
        settings("--host", "0.0.0.0", *words)
    assert "localhost" in settings().allowed_hosts
    with pytest.raises(OSError, match="none"):
        settings("--api-keys", str(file.parent / "none"))


# --- browsers ---


def test_hosts_of_a_server_without_keys(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(allowed_hosts=frozenset({"localhost", "127.0.0.1", "::1"}))) as proxy:
        for host in ("localhost", f"127.0.0.1:{proxy.port}", "[::1]:80", "LOCALHOST:1"):
            assert httpx.get(f"{proxy.root}/v1/models", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "["):
            assert error_of(httpx.get(f"{proxy.root}/v1/models", headers={"host": host}))[0] == 403, host


def test_foreign_pages_cannot_call_a_server_without_keys(backend: FakeBackend) -> None:
    with running_proxy(backend) as proxy:
        url, body = f"{proxy.root}/v1/chat/completions", json.dumps(CHAT)
        for origin in ("https://evil.example", "null", "http://127.0.0.1", ""):
            answer = httpx.post(url, content=body, headers={"content-type": "text/plain", "origin": origin})
            assert error_of(answer) == (403, "origin_not_allowed", None), origin
        assert httpx.post(url, content=body, headers={"origin": proxy.root}).status_code == 200, "its own pages"
    assert len(backend.seen) == 1


Sent = list[dict[str, Any]]


def websocket(app: Any, *headers: tuple[bytes, bytes]) -> Sent:
    """What the app sends to a WebSocket that opens."""
    scope = {
        "type": "websocket", "path": "/v1/no-such-route", "raw_path": b"/v1/no-such-route", "query_string": b"",
        "headers": [(b"host", b"localhost"), *headers], "subprotocols": [], "scheme": "ws", "root_path": "",
        "extensions": {"websocket.http.response": {}},
    }  # fmt: skip
    sent: Sent = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


def test_websockets_need_what_requests_need(backend: FakeBackend) -> None:
    keyed = make_app(backend, Settings(api_key="sécret"))
    for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"sec-websocket-protocol", b"realtime")]):
        assert websocket(keyed, *headers)[0]["status"] == 401
    for header in (
        (b"authorization", "Bearer sécret".encode()),
        (b"sec-websocket-protocol", "realtime, openai-insecure-api-key.sécret".encode()),
    ):
        assert websocket(keyed, header)[0] == {"type": "websocket.close", "code": 1000, "reason": ""}, (
            "there is no route"
        )
    keyless = make_app(backend, Settings(allowed_hosts=frozenset({"127.0.0.1"})))
    assert websocket(keyless)[0]["status"] == 403
    keyless = make_app(backend, Settings())
    assert websocket(keyless, (b"origin", b"https://evil.example"))[0]["status"] == 403


# --- malformed HTTP ---


@pytest.fixture
def talk(proxy: RunningProxy) -> Callable[[bytes], bytes]:
    """Sends bytes, returns all that comes until the proxy closes."""

    def exchange(data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as connection:
            connection.sendall(data)
            answer = b""
            while part := connection.recv(1 << 16):
                answer += part
            return answer

    return exchange


@pytest.mark.parametrize("pad", [70_000, 100_000, 500_000])
def test_heads_that_are_too_large(talk: Callable[[bytes], bytes], pad: int) -> None:
    answer = talk(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\npad: %s\r\n\r\n" % (b"x" * pad))
    assert answer.startswith(b"HTTP/1.1 431 ") and b'"error"' in answer


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    ],
)  # fmt: skip
def test_malformed_requests(talk: Callable[[bytes], bytes], data: bytes) -> None:
    head, _, body = talk(data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_two_ways_to_end_a_body_close_the_connection(talk: Callable[[bytes], bytes], backend: FakeBackend) -> None:
    body = json.dumps(CHAT).encode()
    smuggled = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = talk(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
        b"%x\r\n%s\r\n0\r\n\r\n%s" % (len(body), body, smuggled)
    )
    assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer
    assert len(backend.seen) == 1


def test_a_chunk_that_is_none(talk: Callable[[bytes], bytes], backend: FakeBackend) -> None:
    answer = talk(b"POST /v1/models HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
    assert answer.startswith(b"HTTP/1.1 4") and answer.count(b"HTTP/1.1 ") == 1


def test_digits_are_ascii(proxy: RunningProxy) -> None:
    body = {"model": "fake", "prompt": "x", "size": "\uff11\uff16x16"}
    assert error_of(httpx.post(f"{proxy.root}/v1/images/generations", json=body))[2] == "size"
    assert error_of(chat(proxy, "any", logit_bias={"\uff15": 1}))[2] == "logit_bias"


def test_sighup_reads_the_file_again(file: Path) -> None:
    from tests.kit.proxy_server import proxy_process

    write(file, entry("one"))
    with proxy_process("--triton", "127.0.0.1:1", "--api-keys", str(file)) as proxy:
        assert chat(proxy, "two").status_code == 401
        write(file, entry("two"))
        os.kill(proxy.pid, signal.SIGHUP)
        for _ in range(200):
            if (status := chat(proxy, "two").status_code) != 401:
                break
        assert status == 503, "the key is right, the server is not there"
        assert chat(proxy, "one").status_code == 401
