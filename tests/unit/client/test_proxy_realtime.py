# SPDX-License-Identifier: Apache-2.0
"""wss /v1/realtime: whole turns, what is refused while the session goes on, and what a client that leaves ends.

Every event that comes is read strictly by the SDK's own types.
"""

from __future__ import annotations

import base64
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import openai
import pytest
from openai.types.realtime import ClientSecretCreateResponse, RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.kit.fake_backend import SAMPLES, FakeBackend, sine
from tests.kit.proxy_server import RunningProxy, running_proxy
from triton_omni.backends.wire import Part
from triton_omni.openai.http import access
from triton_omni.openai.http.settings import Settings
from triton_omni.openai.media.audio import to_int16
from triton_omni.openai.realtime import conversation, session

WAIT_S = 20
SERVER_EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
PCM = to_int16(np.concatenate([sine(i * SAMPLES) for i in range(12)])).tobytes()  # 250 ms
SPOKEN = [
    "response.created", "response.output_item.added", "conversation.item.added", "response.content_part.added",
    "response.output_audio_transcript.delta", "response.output_audio.delta",
]  # fmt: skip
SPOKEN_END = [
    "response.output_audio.done", "response.output_audio_transcript.done", "response.content_part.done",
    "response.output_item.done", "conversation.item.done", "response.done",
]  # fmt: skip


class Talk:
    """A client that checks all that it hears."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def say(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def hear(self) -> dict[str, Any]:
        message = self.socket.recv(WAIT_S)
        SERVER_EVENT.validate_json(message, strict=True)
        return json.loads(message)

    def until(self, kind: str) -> list[dict[str, Any]]:
        got = [self.hear()]
        while got[-1]["type"] != kind:
            got.append(self.hear())
        return got

    def update(self, **session: Any) -> dict[str, Any]:
        self.say("session.update", session={"type": "realtime", **session})
        return self.hear()

    def write(self, text: str, **fields: Any) -> dict[str, Any]:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        self.say("conversation.item.create", item=item | fields)
        return self.until("conversation.item.done")[-1]["item"]

    def answer(self, **response: Any) -> list[dict[str, Any]]:
        self.say("response.create", response=response)
        return self.until("response.done")

    def refusal(self, kind: str, **fields: Any) -> tuple[str, str | None]:
        """(code, param) of the error; the session goes on."""
        self.say(kind, event_id="mine", **fields)
        event = self.hear()
        assert event["type"] == "error" and event["error"]["event_id"] == "mine", event
        assert self.update()["type"] == "session.updated"
        return event["error"]["code"], event["error"]["param"]


def url(proxy: RunningProxy, query: str = "?model=fake") -> str:
    return f"ws://127.0.0.1:{proxy.port}/v1/realtime{query}"


@pytest.fixture
def talk(proxy: RunningProxy) -> Iterator[Talk]:
    with connect(url(proxy)) as socket:
        talk = Talk(socket)
        assert talk.hear()["type"] == "session.created"
        yield talk


def kinds(got: list[dict[str, Any]]) -> list[str]:
    """Types of events, repeated ones once."""
    return [kind for kind, _ in itertools.groupby(event["type"] for event in got)]


def text_in(message: Any) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def audio_of(got: list[dict[str, Any]]) -> bytes:
    deltas = [base64.b64decode(e["delta"]) for e in got if e["type"] == "response.output_audio.delta"]
    assert all(len(delta) % 2 == 0 for delta in deltas), "a sample is split"
    return b"".join(deltas)


# --- turns -----------------------------------------------------------------------------------------------------------
def test_a_spoken_turn(talk: Talk, backend: FakeBackend) -> None:
    for part in (PCM[:5000], PCM[5000:]):
        talk.say("input_audio_buffer.append", audio=base64.b64encode(part).decode())
    talk.say("input_audio_buffer.commit")
    committed, added, done = talk.until("conversation.item.done")
    assert committed["type"] == "input_audio_buffer.committed" and committed["previous_item_id"] is None
    assert added["item"]["id"] == done["item"]["id"] == committed["item_id"]
    got = talk.answer()
    order = kinds(got)
    assert order[:6] == SPOKEN and order[-6:] == SPOKEN_END
    response = got[-1]["response"]
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete"), "the fake's limit"
    assert response["usage"]["output_tokens"] == 3
    assert response["output"][0]["content"] == [{"type": "output_audio", "transcript": "w0 w1 w2 "}]
    assert audio_of(got) == b"".join(to_int16(sine(i * SAMPLES)).tobytes() for i in range(3))
    [call] = backend.seen
    assert call.request.modalities == ("text", "audio")
    [message] = call.request.messages
    [part] = cast("tuple[Part, ...]", message.content)
    assert part.type == "audio" and call.media["audio"].size == pytest.approx(len(PCM) / 2 * 16 / 24, abs=64)


def test_a_pipeline_that_transcribes_reads_words(proxy: RunningProxy, backend: FakeBackend) -> None:
    backend.operations["fake"] = ["chat", "speech", "transcription"]
    with connect(url(proxy)) as socket:
        talk = Talk(socket)
        talk.hear()
        talk.update(audio={"input": {"transcription": {"model": "whisper-1", "language": "en"}}})
        talk.say("input_audio_buffer.append", audio=base64.b64encode(PCM).decode())
        talk.say("input_audio_buffer.commit")
        kind = "conversation.item.input_audio_transcription.completed"
        event = talk.until(kind)[-1]
        assert event["transcript"] == "Hello there. How are you?" and event["usage"] == {
            "type": "duration",
            "seconds": 3,
        }
        talk.answer()
    hearing, chat = backend.seen
    assert (hearing.request.operation, hearing.request.transcription.language) == ("transcription", "en")
    assert text_in(chat.request.messages[0]) == "Hello there. How are you?" and not chat.media


def test_the_chat_is_that_of_the_chat_route(talk: Talk, sdk: openai.OpenAI, backend: FakeBackend) -> None:
    talk.update(instructions="Be brief.", output_modalities=["text"], temperature=0.5, seed=7, max_output_tokens=9)
    talk.write("Hello")
    event = talk.answer()[-1]["response"]["output"][0]["content"][0]["text"]
    messages: Any = [{"role": "system", "content": "Be brief."},
                     {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]  # fmt: skip
    chat = sdk.chat.completions.create(
        model="fake", messages=messages, modalities=["text"], temperature=0.5, seed=7, max_completion_tokens=9
    )
    assert chat.choices[0].message.content == event
    assert backend.seen[0].request == backend.seen[1].request


def test_an_answer_is_part_of_the_next_turn(talk: Talk, backend: FakeBackend) -> None:
    talk.write("One")
    talk.answer()
    talk.write("Two")
    talk.answer()
    assert [(m.role, text_in(m)) for m in backend.seen[-1].request.messages] == [
        ("user", "One"), ("assistant", "w0 w1 w2 "), ("user", "Two")]  # fmt: skip


def test_a_response_beside_the_conversation(talk: Talk, backend: FakeBackend) -> None:
    item = talk.write("One")
    got = talk.answer(conversation="none", metadata={"topic": "x"}, output_modalities=["text"], input=[
        {"type": "item_reference", "id": item["id"]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Two"}]},
    ])  # fmt: skip
    assert "conversation.item.added" not in kinds(got) and got[-1]["response"]["metadata"] == {"topic": "x"}
    assert [text_in(m) for m in backend.seen[-1].request.messages] == ["One", "Two"]
    talk.answer()
    assert [text_in(m) for m in backend.seen[-1].request.messages] == ["One"]


def test_function_calls(talk: Talk, backend: FakeBackend) -> None:
    from triton_omni.backends.core.outputs import FunctionCall, TextPiece

    backend.extra = TextPiece(tool_calls=(FunctionCall("call_1", "look", '{"at": "sky"}'),))
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    talk.update(tools=[tool], output_modalities=["text"], parallel_tool_calls=False)
    talk.write("Look up")
    got = talk.answer()
    calls = [item for item in got[-1]["response"]["output"] if item["type"] == "function_call"]
    assert [(c["name"], c["call_id"], c["arguments"], c["status"]) for c in calls] == [
        ("look", "call_1", '{"at": "sky"}', "completed")]  # fmt: skip
    backend.extra = TextPiece()
    talk.say("conversation.item.create", item={"type": "function_call_output", "call_id": "call_1", "output": "blue"})
    talk.until("conversation.item.done")
    talk.answer()
    roles = [message.role for message in backend.seen[-1].request.messages]
    assert roles == ["user", "assistant", "assistant", "tool"] or roles == ["user", "assistant", "tool"]


def test_the_sdk_talks(proxy: RunningProxy) -> None:
    with proxy.sdk() as client, client.realtime.connect(model="fake") as connection:
        assert connection.recv().type == "session.created"
        connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        content: Any = [{"type": "input_text", "text": "Hello"}]
        connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        connection.response.create()
        text = ""
        for event in connection:
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type == "response.done":
                break
    assert text == "w0 w1 w2 "


# --- items -----------------------------------------------------------------------------------------------------------
def test_items_come_and_go(talk: Talk, backend: FakeBackend) -> None:
    talk.write("B", id="b")
    talk.write("A", id="a")
    talk.say("conversation.item.create", previous_item_id="root", item={
        "type": "message", "id": "0", "role": "system", "content": [{"type": "input_text", "text": "S"}]})  # fmt: skip
    assert talk.until("conversation.item.done")[-1]["previous_item_id"] is None
    audio = base64.b64encode(PCM).decode()
    item = {"type": "message", "id": "c", "role": "user", "content": [{"type": "input_audio", "audio": audio}]}
    talk.say("conversation.item.create", previous_item_id="b", item=item)
    talk.until("conversation.item.done")
    talk.say("conversation.item.retrieve", item_id="c")
    assert talk.hear()["item"]["content"][0]["audio"] == audio
    talk.say("conversation.item.delete", item_id="a")
    assert talk.hear() | {"event_id": ""} == {"type": "conversation.item.deleted", "item_id": "a", "event_id": ""}
    talk.answer(output_modalities=["text"])
    contents = [m.content if isinstance(m.content, str) else m.content[0] for m in backend.seen[-1].request.messages]
    assert [getattr(c, "text", c) or "audio" for c in contents] == ["S", "B", "audio"]


def test_what_was_not_part_is_forgotten(talk: Talk, backend: FakeBackend) -> None:
    talk.write("One")
    item = talk.answer()[-1]["response"]["output"][0]
    total_ms = 3 * SAMPLES * 1000 // 24_000
    place = {"item_id": item["id"], "content_index": 0}
    code, param = talk.refusal("conversation.item.truncate", **place, audio_end_ms=total_ms + 1)
    assert (code, param) == ("invalid_value", "audio_end_ms")
    talk.say("conversation.item.truncate", **place, audio_end_ms=total_ms // 2)
    assert talk.hear()["type"] == "conversation.item.truncated"
    talk.write("Two")
    talk.answer()
    assert text_in(backend.seen[-1].request.messages[1]) == "w0", "half of three words, at a word's end"


# --- refusals, ends --------------------------------------------------------------------------------------------------
CREATE = "conversation.item.create"
TEXT = [{"type": "input_text", "text": "x"}]


def config(**fields: Any) -> Any:
    return {"session": {"type": "realtime", **fields}}


def given(role: str, **fields: Any) -> Any:
    return {"item": {"type": "message", "role": role, "content": TEXT}, **fields}


PCMU = {"output": {"format": {"type": "audio/pcmu"}}}
VAD = {"input": {"turn_detection": {"type": "server_vad"}}}


@pytest.mark.parametrize(
    ("kind", "fields", "code", "param"),
    [
        ("nothing", {}, "invalid_value", "type"),
        ("input_audio_buffer.commit", {}, "input_audio_buffer_commit_empty", "input_audio_buffer"),
        ("input_audio_buffer.append", {}, "missing_required_parameter", "audio"),
        ("input_audio_buffer.append", {"audio": "AAA*"}, "invalid_audio", "audio"),
        ("input_audio_buffer.append", {"audio": "AAAA"}, "invalid_audio", "audio"),
        ("response.cancel", {}, "response_cancel_not_active", "response_id"),
        ("response.create", {"response": {"max_output_tokens": 0}}, "invalid_value", "response.max_output_tokens"),
        ("session.update", config(model="other"), "invalid_value", "session.model"),
        ("session.update", {"session": {"type": "transcription"}}, "unsupported_value", "session.type"),
        ("session.update", config(audio=VAD), "unsupported_value", "session.audio.input.turn_detection"),
        ("session.update", config(audio=PCMU), "unsupported_value", "session.audio.output.format.type"),
        ("session.update", config(instruction="x"), "unknown_parameter", "session.instruction"),
        (CREATE, given("assistant"), "invalid_value", "item.content[0].type"),
        (CREATE, given("user", previous_item_id="no"), "item_not_found", "previous_item_id"),
        ("conversation.item.delete", {"item_id": "no"}, "item_not_found", "item_id"),
        ("output_audio_buffer.clear", {}, "invalid_value", "type"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_and_the_session_goes_on(talk: Talk, kind: str, fields: Any, code: str, param: str):
    assert talk.refusal(kind, **fields) == (code, param)


@pytest.mark.parametrize("message", ["{", "[]", '{"type": 5}', b"\xff\xfe\x00"])
def test_what_is_no_event_is_an_error(talk: Talk, message: Any) -> None:
    talk.socket.send(message)
    assert talk.hear()["type"] == "error"
    assert talk.update()["type"] == "session.updated"


def test_a_lenient_session_keeps_no_names(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[Any] = []
    kept = session.Session.start

    async def start(self: session.Session) -> None:
        contexts.append(self._context)
        await kept(self)

    monkeypatch.setattr(session.Session, "start", start)
    with running_proxy(backend, Settings(is_lenient=True)) as proxy, connect(url(proxy)) as socket:
        talk = Talk(socket)
        talk.hear()
        for _ in range(3):
            assert talk.update(instruction="x")["type"] == "session.updated"
        assert contexts[0].ignored == []


def test_the_buffer_is_bounded(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_TURN_S", 0.3)
    audio = base64.b64encode(PCM).decode()
    talk.say("input_audio_buffer.append", audio=audio)
    assert talk.refusal("input_audio_buffer.append", audio=audio) == ("invalid_value", "audio")
    talk.say("input_audio_buffer.clear")
    assert talk.hear()["type"] == "input_audio_buffer.cleared"
    assert talk.refusal("input_audio_buffer.commit")[0] == "input_audio_buffer_commit_empty"


def test_what_a_session_holds_is_charged(backend: FakeBackend) -> None:
    limits = replace(Settings().limits, held_bytes=(4 << 20))
    with running_proxy(backend, Settings(limits=limits)) as proxy, connect(url(proxy), max_size=None) as socket:
        talk = Talk(socket)
        talk.hear()
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * (1 << 20)}]}
        for i in range(2):
            talk.say(CREATE, item={**item, "id": f"i{i}"})
            talk.until("conversation.item.done")
        code, _ = talk.refusal(CREATE, item=item)
        assert code == "content_too_large"
        talk.say("conversation.item.delete", item_id="i0")
        talk.until("conversation.item.deleted")
        talk.say(CREATE, item=item)
        talk.until("conversation.item.done")


def test_a_conversation_is_bounded(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_ITEMS", 1)
    talk.write("One")
    item = {"type": "message", "role": "user", "content": TEXT}
    assert talk.refusal(CREATE, item=item) == ("invalid_value", "item")


def test_a_cancelled_answer_ends_with_all_its_ends(talk: Talk, backend: FakeBackend) -> None:
    backend.hold_after = 2
    talk.write("One")
    talk.say("response.create")
    talk.until("response.output_audio.delta")
    code, _ = talk.refusal("response.create")
    assert code == "conversation_already_has_active_response"
    talk.say("response.cancel")
    got = talk.until("response.done")
    assert kinds(got) == SPOKEN_END
    response = got[-1]["response"]
    assert response["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
    assert response["output"][0]["status"] == "incomplete"
    assert backend.seen[0].over.wait(WAIT_S) and not backend.seen[0].completed
    backend.hold_after = None
    assert talk.answer()[-1]["response"]["status"] == "incomplete", "the next one is made as always"


def test_a_failed_answer_is_reported_once(talk: Talk, backend: FakeBackend) -> None:
    backend.fail_after = 2
    talk.write("One")
    response = talk.answer()[-1]["response"]
    assert (response["status"], response["status_details"]["type"]) == ("failed", "failed")
    assert "out of luck" in response["status_details"]["error"]["message"]
    backend.fail_after = None
    assert talk.answer()[-1]["response"]["status"] == "incomplete"


def test_nothing_to_answer(talk: Talk) -> None:
    response = talk.answer()[-1]["response"]
    assert response["status_details"]["error"]["code"] == "conversation_empty" and response["output"] == []


def test_a_client_that_leaves_ends_its_run(proxy: RunningProxy, backend: FakeBackend) -> None:
    backend.hold_after = 2
    with connect(url(proxy)) as socket:
        talk = Talk(socket)
        talk.hear()
        talk.write("One")
        talk.say("response.create")
        talk.until("response.output_audio.delta")
    assert backend.seen[0].over.wait(WAIT_S) and not backend.seen[0].completed


@pytest.mark.parametrize(("query", "status"), [("?model=unknown", 404), ("", 400)])
def test_a_socket_without_a_model_is_refused(proxy: RunningProxy, query: str, status: int) -> None:
    with pytest.raises(InvalidStatus) as caught, connect(url(proxy, query)):
        pass
    assert caught.value.response.status_code == status
    assert json.loads(caught.value.response.body)["error"]["param"] == "model"


def test_a_socket_needs_the_key(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(api_key="secret")) as proxy:
        with pytest.raises(InvalidStatus) as caught, connect(url(proxy)):
            pass
        assert caught.value.response.status_code == 401
        protocols: Any = ["realtime", "openai-insecure-api-key.secret"]
        with connect(url(proxy), subprotocols=protocols) as socket:
            assert socket.subprotocol == "realtime"
            assert Talk(socket).hear()["type"] == "session.created"


# --- client secrets --------------------------------------------------------------------------------------------------
def secret(proxy: RunningProxy, key: str = "secret", **body: Any) -> Any:
    with proxy.sdk(api_key=key) as client:
        answer = client.realtime.client_secrets.with_raw_response.create(**body).http_response
    TypeAdapter(ClientSecretCreateResponse).validate_json(answer.content)
    return answer.json()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def refused_status(address: str, key: str) -> int:
    with pytest.raises(InvalidStatus) as caught, connect(address, additional_headers=bearer(key)):
        pass
    return caught.value.response.status_code


def test_a_client_secret_opens_configured_sessions_and_nothing_else(backend: FakeBackend) -> None:
    with running_proxy(backend, Settings(api_key="secret")) as proxy:
        config: Any = {"type": "realtime", "model": "fake", "instructions": "Be brief.", "output_modalities": ["text"]}
        made = secret(proxy, session=config, expires_after={"anchor": "created_at", "seconds": 60})
        assert made["value"].startswith("ek_") and made["session"]["instructions"] == "Be brief."
        protocols: Any = ["realtime", f"openai-insecure-api-key.{made['value']}"]
        with connect(url(proxy, ""), subprotocols=protocols) as socket:
            talk = Talk(socket)
            assert talk.hear()["session"]["instructions"] == "Be brief."
            talk.write("One")
            talk.answer()
            assert text_in(backend.seen[0].request.messages[0]) == "Be brief."
        with proxy.sdk(api_key=made["value"]) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            with pytest.raises(openai.AuthenticationError):
                client.realtime.client_secrets.create()


def test_what_is_no_valid_client_secret_is_refused(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(api_key="secret")
    with running_proxy(backend, settings) as proxy, running_proxy(backend, settings) as other:
        config: Any = {"type": "realtime", "model": "fake"}
        value = secret(proxy, session=config)["value"]
        data, _, signature = value.partition(".")
        foreign = secret(other, session=config)["value"]
        for wrong in (value[:-2], f"{data}x.{signature}", f"{data}.", "ek_.", "ek_", "ek_a.b", foreign):
            assert refused_status(url(proxy), wrong) == 401
        assert refused_status(url(proxy, "?model=painter"), value) == 400
        now_s = time.time()
        monkeypatch.setattr(access.time, "time", lambda: now_s + 601)
        assert refused_status(url(proxy), value) == 401, "it has expired"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"expires_after": {"anchor": "created_at", "seconds": 9}}, "expires_after.seconds"),
        ({"session": {"type": "realtime", "model": "unknown"}}, "session.model"),
        ({"session": {"type": "realtime", "model": "fake", "instructions": "x" * 9000}}, "session"),
        ({}, "session.model"),
    ],
)
def test_a_bad_request_for_a_client_secret_names_the_field(proxy: RunningProxy, body: Any, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught, proxy.sdk() as client:
        client.realtime.client_secrets.create(**body)
    assert caught.value.status_code in (400, 404) and caught.value.param == param
