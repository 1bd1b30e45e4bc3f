# SPDX-License-Identifier: Apache-2.0
"""/v1/responses through the real SDK: types and order of events, continued responses, what is kept and for whom."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.kit.fake_backend import FakeBackend
from tests.kit.proxy_server import RunningProxy, running_proxy
from tests.kit.request_mutations import PNG
from triton_omni.backends.core.outputs import Candidate, FunctionCall, TextPiece, TokenLogprob
from triton_omni.openai.http.access import KeyFile, new_key
from triton_omni.openai.http.errors import ApiError
from triton_omni.openai.http.settings import Settings
from triton_omni.openai.http.stored_responses import ResponseStore, StoredResponse

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: Any = [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}]
TEXT_EVENTS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.delta", "response.output_text.delta",
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
CALL_EVENTS = [
    "response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
    "response.output_item.done",
]  # fmt: skip
IMAGE = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


class CallingBackend(FakeBackend):
    """Says two words, then calls a function twice."""

    def _pieces(self, request: Any) -> Any:
        *words, end = super()._pieces(request)
        calls = (FunctionCall("call_1", "f", '{"a": 1}'), FunctionCall("call_2", "f", "{}"))
        called = msgspec.structs.replace(end.event, type="text", output="text", piece=TextPiece(tool_calls=calls))
        yield from words[:2]
        yield type(end)(called, "")
        yield end


def create(sdk: openai.OpenAI, **more: Any) -> Any:
    return sdk.responses.create(**{"model": "fake", "input": "hello", **more})


def check_known(model: BaseModel) -> None:
    """Every value has the type that the SDK declares, and no required one is missing."""
    type(model).model_validate(model.model_dump(by_alias=True, exclude_unset=True), strict=True)


def raw_events(proxy: RunningProxy, **more: Any) -> list[dict[str, Any]]:
    """The events as sent; each `event:` line is the type of its data."""
    body = {"model": "fake", "input": "hello", "stream": True, **more}
    text = httpx.post(f"{proxy.root}/v1/responses", json=body).text
    events = list[dict[str, Any]]()
    for block in text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def check_stream(events: list[dict[str, Any]]) -> None:
    """All events are OpenAI's, numbered from 0; what is done was added before, at the same place."""
    for event in events:
        EVENTS.validate_json(json.dumps(event), strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = {event["item"]["id"]: event["output_index"] for event in events if event["type"].endswith("item.added")}
    assert sorted(added.values()) == list(range(len(added)))
    for event in events:
        item_id = event.get("item_id") or event.get("item", {}).get("id")
        assert item_id is None or added[item_id] == event["output_index"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done


def test_text_at_once(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    answer = create(sdk, max_output_tokens=3, instructions="Be brief.", temperature=0.5, metadata={"a": "b"})
    check_known(answer)
    assert answer.output_text == "w0 w1 w2 "
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (5, 3, 8)
    assert (answer.metadata, answer.instructions, answer.temperature) == ({"a": "b"}, "Be brief.", 0.5)
    request = backend.seen[0].request
    assert [(m.role, m.content) for m in request.messages] == [("system", "Be brief."), ("user", "hello")]
    assert (request.operation, request.modalities, request.sampling.max_tokens) == ("chat", ("text",), 3)


def test_a_stream_of_text(proxy: RunningProxy, backend: FakeBackend) -> None:
    backend.reason = "stop"
    events = raw_events(proxy, max_output_tokens=3)
    check_stream(events)
    assert [event["type"] for event in events] == [*TEXT_EVENTS, "response.completed"]
    assert "".join(event.get("delta", "") for event in events) == "w0 w1 w2 "
    whole = events[-1]["response"]
    assert whole["status"] == "completed" and whole["usage"]["output_tokens"] == 3
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None


def test_the_stream_helper_of_the_sdk(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    backend.reason = "stop"
    with sdk.responses.stream(model="fake", input="hello", max_output_tokens=3) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed" and final.output_text == "w0 w1 w2 "


@pytest.mark.parametrize("parallel", [True, False])
def test_function_calls(parallel: bool) -> None:
    backend = CallingBackend(reason="tool_calls")
    with running_proxy(backend) as proxy:
        events = raw_events(proxy, tools=TOOLS, parallel_tool_calls=parallel)
        check_stream(events)
        calls = 2 if parallel else 1
        kinds = [event["type"] for event in events]
        assert kinds[-1 - calls * 4 :] == [*CALL_EVENTS * calls, "response.completed"]
        whole = events[-1]["response"]
        assert [item["type"] for item in whole["output"]] == ["message", *["function_call"] * calls]
        answer = create(proxy.sdk(), tools=TOOLS, parallel_tool_calls=parallel)
        check_known(answer)
        assert answer.status == "completed"
        call = answer.output[1]
        assert (call.name, call.arguments, call.call_id) == ("f", '{"a": 1}', "call_1")
        [tool] = backend.seen[0].request.tools
        assert tool["type"] == "function" and tool["function"]["name"] == "f" and tool["function"]["strict"] is True


def test_answers_of_functions_follow_the_calls(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    create(sdk, tools=TOOLS, input=[
        {"role": "user", "content": "weather?"}, {"type": "reasoning", "id": "r", "summary": []},
        {"role": "assistant", "content": "One moment."},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "rain"}]},
    ])  # fmt: skip
    user, said, first, second = backend.seen[0].request.messages
    assert (user.role, said.role, said.content) == ("user", "assistant", "One moment.")
    assert [call["id"] for call in said.tool_calls] == ["a", "b"]
    assert (first.role, first.tool_call_id, first.content) == ("tool", "a", "sun")
    assert (second.tool_call_id, second.parts[0].text) == ("b", "rain")


def test_log_probabilities(proxy: RunningProxy, backend: FakeBackend) -> None:
    backend.extra = TextPiece(
        logprobs=(TokenLogprob(5, "w", -0.5, (Candidate(5, "w", -0.5), Candidate(6, "v", -2.0))),)
    )
    events = raw_events(proxy, max_output_tokens=3, top_logprobs=1)
    check_stream(events)
    [message] = events[-1]["response"]["output"]
    assert [entry["logprob"] for entry in message["content"][0]["logprobs"]] == [-0.5] * 3
    assert len(message["content"][0]["logprobs"][0]["top_logprobs"]) == 1


def test_images(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    part = {"type": "input_image", "image_url": IMAGE, "detail": "auto"}
    create(sdk, input=[{"role": "user", "content": [{"type": "input_text", "text": "what?"}, part]}])
    text, image = backend.seen[0].request.messages[0].parts
    assert (text.text, image.type, image.shape) == ("what?", "image", (8, 8, 3))


def test_structured_text(sdk: openai.OpenAI, backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    answer = create(sdk, text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    check_known(answer)
    assert backend.seen[0].request.sampling.json_schema == schema
    assert answer.text.format.schema_ == schema


# --- errors ---


def test_a_failure_midway_is_one_failed_event(proxy: RunningProxy, backend: FakeBackend) -> None:
    backend.fail_after = 1
    events = raw_events(proxy)
    for event in events:
        EVENTS.validate_json(json.dumps(event), strict=True)
    assert [event["type"] for event in events].count("response.failed") == 1
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
    assert "out of luck" in failed["error"]["message"]
    assert httpx.get(f"{proxy.root}/v1/responses/{failed['id']}").status_code == 404


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"background": True}, "background", "unsupported_value"),
        ({"truncation": "auto"}, "truncation", "unsupported_value"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_value"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_value"),
        ({"include": ["file_search_call.results"]}, "include[0]", "unsupported_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_value"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": TOOLS}, "tool_choice.name", "invalid_value"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type", "unsupported_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
         "input[0].content[0].type", "unsupported_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f", "image_url": IMAGE}]}]},
         "input[0].content[0].file_id", "unsupported_value"),
        ({"input": [{"type": "computer_call_output"}]}, "input[0].type", "unsupported_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}]},
         "input[0].content[0].image_url", "invalid_image"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}},
         "text.format.schema", "missing_required_parameter"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "invalid_value"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens", "unknown_parameter"),
    ],
)  # fmt: skip
def test_what_is_refused(sdk: openai.OpenAI, backend: FakeBackend, more: Any, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(sdk, **more)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert not backend.seen


def test_an_unknown_item_is_answered_with_those_that_are_known(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'message', 'function_call'") as caught:
        create(sdk, input=[{"type": "mcp_call"}])
    assert caught.value.param == "input[0].type"


@pytest.mark.parametrize(("where", "param"), [
    ("messages[0]", "instructions"), ("messages[1]", "input[0]"), ("messages[2].tool_calls[0]", "input[1]"),
    ("messages", "input"), ("sampling.max_tokens", "max_output_tokens"),
    ("sampling.json_schema", "text.format.schema"), ("modalities", "model"), ("tools", "tools"),
])  # fmt: skip
def test_the_servers_refusals_name_the_item(sdk: openai.OpenAI, backend: FakeBackend, where: str, param: str) -> None:
    backend.refusal = f"[bad_request:{where}] no"
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        create(sdk, instructions="s", input=items)
    assert caught.value.param == param


# --- what is kept ---


def test_a_response_is_continued_with_its_items_and_without_its_instructions(
    sdk: openai.OpenAI, backend: FakeBackend
) -> None:
    first = create(sdk, input="one", instructions="Be brief.", max_output_tokens=1)
    second = create(sdk, input="two", previous_response_id=first.id, max_output_tokens=1)
    create(sdk, input="three", previous_response_id=second.id, instructions="Be long.")
    said = [(m.role, "".join(part.text for part in m.parts)) for m in backend.seen[2].request.messages]
    assert said == [
        ("system", "Be long."), ("user", "one"), ("assistant", "w0 "), ("user", "two"), ("assistant", "w0 "),
        ("user", "three"),
    ]  # fmt: skip
    create(sdk, input=[{"type": "item_reference", "id": second.output[0].id}, {"role": "user", "content": "x"}])
    assert backend.seen[3].request.messages[0].parts[0].text == "w0 "


def test_stored_responses_are_read_and_deleted(sdk: openai.OpenAI) -> None:
    answer = create(sdk)
    assert sdk.responses.retrieve(answer.id) == answer
    sdk.responses.delete(answer.id)
    for call in (sdk.responses.retrieve, sdk.responses.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(answer.id)
        assert caught.value.code == "response_not_found"


def test_streams_are_stored_too(sdk: openai.OpenAI) -> None:
    *_, last = create(sdk, stream=True)
    assert sdk.responses.retrieve(last.response.id).output_text == last.response.output_text


def test_what_is_not_stored_cannot_be_continued(sdk: openai.OpenAI) -> None:
    answer = create(sdk, store=False)
    assert answer.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError, match="never stored") as caught:
        create(sdk, previous_response_id=answer.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_an_id_of_another_replica_says_so(sdk: openai.OpenAI) -> None:
    with running_proxy(FakeBackend()) as other:
        foreign = create(other.sdk())
    with pytest.raises(openai.NotFoundError, match="another replica") as caught:
        create(sdk, previous_response_id=foreign.id)
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError, match="another replica"):
        sdk.responses.retrieve(foreign.id)


def test_one_key_cannot_read_what_another_one_has_stored(tmp_path: Path) -> None:
    keys = [new_key(name) for name in ("a", "b")]
    file = tmp_path / "keys.json"
    file.write_bytes(msgspec.json.encode(KeyFile(tuple(entry for _, entry in keys))))
    with running_proxy(FakeBackend(), Settings(api_keys=file)) as proxy:
        mine, theirs = (proxy.sdk(api_key=key) for key, _ in keys)
        answer = create(mine)
        assert mine.responses.retrieve(answer.id).id == answer.id
        with pytest.raises(openai.NotFoundError):
            theirs.responses.retrieve(answer.id)
        with pytest.raises(openai.NotFoundError):
            theirs.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            create(theirs, previous_response_id=answer.id)
        with pytest.raises(openai.NotFoundError):
            create(theirs, input=[{"type": "item_reference", "id": answer.output[0].id}])
        assert mine.responses.retrieve(answer.id).id == answer.id


def stored(number: int, nbytes: int = 10, previous: str = "") -> StoredResponse:
    return StoredResponse(f"resp_{number}", previous, b"", b"x" * nbytes)


def kept(store: ResponseStore, owner: str, count: int) -> list[int]:
    def is_kept(number: int) -> bool:
        try:
            return store.find(owner, f"resp_{number}").id != ""
        except ApiError:
            return False

    return [number for number in range(count) if is_kept(number)]


def test_a_key_keeps_its_latest_responses_up_to_a_number_and_a_size() -> None:
    store = ResponseStore(max_responses=3, max_bytes=100, total_bytes=1000)
    for number in range(4):
        assert store.keep("a", stored(number))
    store.find("a", "resp_1")
    store.keep("a", stored(4))
    assert kept(store, "a", 5) == [1, 3, 4], "the one that was used again stays"
    assert store.keep("a", stored(5, 95)) and kept(store, "a", 6) == [5] and store.nbytes == 95
    assert not store.keep("a", stored(6, 101)) and kept(store, "a", 7) == [5], "what never fits drops nothing"
    store.delete("a", "resp_5")
    assert store.nbytes == 0


def test_all_keys_together_are_bounded_at_the_cost_of_the_largest() -> None:
    store = ResponseStore(max_responses=10, max_bytes=100, total_bytes=150)
    for number in range(2):
        store.keep("large", stored(number, 50))
    store.keep("small", stored(0, 40))
    store.keep("small", stored(1, 40))
    assert (kept(store, "large", 2), kept(store, "small", 2)) == ([1], [0, 1])
    assert store.nbytes == 130
