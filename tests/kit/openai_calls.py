# SPDX-License-Identifier: Apache-2.0
"""One table of calls through the openai SDK, good and bad, over all routes: what each must be answered with."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import openai
from openai.types import Completion, ImagesResponse, Model
from openai.types.audio import Transcription, TranscriptionVerbose
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.kit.request_mutations import PNG, TOOL, WAV

Server = Literal["both", "toy", "fake"]
"""Where a row holds: the real server with the toy pipeline, its stand-in that also draws and transcribes, or both."""

TEXT = "w0 w1 w2 "
IMAGE = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
AUDIO = base64.b64encode(WAV).decode()
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
VALUE, UNSUPPORTED, TYPE = "invalid_value", "unsupported_value", "invalid_type"
UNKNOWN, MISSING = "unknown_parameter", "missing_required_parameter"
REQUEST = "invalid_request_error"


@dataclass(frozen=True)
class Call:
    """One row: the SDK's method, its arguments, and what must come back.

    shape  of a success: the SDK's type, checked strictly; for streams that of each event; bytes: any content
    """

    method: str
    args: dict[str, Any]
    status: int = 200
    code: str | None = None
    param: str | None = None
    shape: Any = None
    server: Server = "both"
    kind: str = REQUEST

    @property
    def name(self) -> str:
        """For the test's id."""
        args = json.dumps({k: v for k, v in self.args.items() if k not in ("model", "messages")}, default=str)
        return f"{self.method.removesuffix('.create')} {args[:60]}"


def judge(sdk: openai.OpenAI, call: Call, model: str) -> None:
    """Make the call and compare. Raises AssertionError."""
    args = {"model": model, **call.args} if call.method not in UNMODELLED else dict(call.args)
    owner, _, method = call.method.rpartition(".")
    target = attrgetter(f"{owner}.with_raw_response" if owner else method)(sdk)
    refusal: openai.APIStatusError | None = None
    answer: Any = None
    try:
        answer = getattr(target, method)(**args) if owner else target(**args, cast_to=object)
    except openai.APIStatusError as error:
        refusal = error
    if refusal is not None:
        check_error(refusal, call)
        return
    assert call.code is None, f"accepted, not refused with {call.code}"
    if not owner:
        return
    assert answer.status_code == call.status
    check_shape(answer, call.shape, is_stream=bool(args.get("stream")))


def check_error(error: openai.APIStatusError, call: Call) -> None:
    """Exactly what the row says, in OpenAI's shape."""
    body = error.response.json()
    assert (error.status_code, error.code, error.param) == (call.status, call.code, call.param), body
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == call.kind and len(body["error"]["message"]) > 10
    assert error.request_id


def check_shape(answer: Any, shape: Any, *, is_stream: bool) -> None:
    """Each value has the type that the SDK declares for it."""
    if shape is bytes:
        assert answer.content
        return
    adapter: TypeAdapter[Any] = TypeAdapter(shape)
    if not is_stream:
        adapter.validate_json(answer.content, strict=True)
        return
    lines = [line[6:] for line in answer.http_response.read().decode().splitlines() if line.startswith("data: ")]
    events = [line for line in lines if line != "[DONE]"]
    assert events
    for event in events:
        adapter.validate_json(event, strict=True)


UNMODELLED = frozenset({"models.list", "models.retrieve", "responses.retrieve", "responses.delete", "get", "post"})
CHAT, COMPLETE, RESPOND = "chat.completions.create", "completions.create", "responses.create"
USER = [{"role": "user", "content": "hello there"}]
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER}, COMPLETE: {"prompt": "hello there"}, RESPOND: {"input": "hello there"},
}  # fmt: skip


def bad(method: str, *rows: tuple[dict[str, Any], str, str | None], server: Server = "both") -> Iterator[Call]:
    """Calls that are answered with 400, beside the method's base."""
    for args, code, param in rows:
        yield Call(method, {**BASES.get(method, {}), **args}, 400, code, param, server=server)


def good(method: str, shape: Any, *rows: dict[str, Any], server: Server = "both") -> Iterator[Call]:
    """Calls that succeed, beside the method's base."""
    for args in rows:
        yield Call(method, {**BASES.get(method, {}), **args}, shape=shape, server=server)


def _extra(**fields: Any) -> dict[str, Any]:
    return {"extra_body": fields}


def _user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def _sampling() -> Iterator[Call]:
    """What the three text routes share."""
    shapes = {CHAT: ChatCompletion, COMPLETE: Completion, RESPOND: Response}
    for method, shape in shapes.items():
        yield from good(
            method, shape, {}, {"temperature": 0}, {"temperature": 2.0}, {"top_p": 0}, {"top_p": 1},
            _extra(priority=0), _extra(deadlines={"total_s": 30.0}), {"user": "someone"}, {"temperature": None},
        )  # fmt: skip
        yield from bad(
            method,
            ({"temperature": 2.1}, VALUE, "temperature"),
            ({"temperature": -0.1}, VALUE, "temperature"),
            ({"temperature": "hot"}, TYPE, "temperature"),
            ({"top_p": 1.5}, VALUE, "top_p"),
            (_extra(priority=101), VALUE, "priority"),
            (_extra(deadlines={"total_s": -1}), VALUE, "deadlines.total_s"),
            (_extra(deadlines={"total": 1}), UNKNOWN, "deadlines.total"),
            (_extra(tempreature=1), UNKNOWN, "tempreature"),
            ({"stream": "yes"}, TYPE, "stream"),
            ({"stream_options": {"include_obfuscation": True}}, VALUE, "stream_options"),
            ({"model": 5}, TYPE, "model"),
        )
        yield from bad(method, (_extra(stages={"cellar": {}}), VALUE, "stages.cellar"), server="toy")
        yield Call(method, {**BASES[method], "model": "nothing"}, 404, "model_not_found", "model")
    for method in (CHAT, COMPLETE):
        yield from good(
            method, shapes[method], {"n": 3, "max_tokens": 2}, {"stop": "x"}, {"stop": ["x", "y"]}, {"seed": -5},
            {"frequency_penalty": 1.0, "presence_penalty": -1.0}, {"logit_bias": {"5": 1}}, _extra(top_k=5, min_p=0.1),
        )  # fmt: skip
        yield from bad(
            method,
            ({"n": 0}, VALUE, "n"), ({"n": 17}, VALUE, "n"), ({"n": 1.5}, TYPE, "n"),
            ({"max_tokens": 0}, VALUE, "max_tokens"), ({"max_tokens": "9"}, TYPE, "max_tokens"),
            ({"stop": ["a", "b", "c", "d", "e"]}, VALUE, "stop"), ({"stop": ""}, VALUE, "stop"),
            ({"frequency_penalty": 3}, VALUE, "frequency_penalty"),
            ({"presence_penalty": -3}, VALUE, "presence_penalty"),
            ({"logit_bias": {"5": 101}}, VALUE, "logit_bias.5"), ({"logit_bias": {"x": 1}}, VALUE, "logit_bias"),
            ({"seed": 2**63}, VALUE, "seed"), (_extra(repetition_penalty=0), VALUE, "repetition_penalty"),
        )  # fmt: skip


def _chat() -> Iterator[Call]:
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "sine", "format": "wav"}}
    yield from good(
        CHAT, ChatCompletion, {"max_completion_tokens": 3}, spoken, {"logprobs": True, "top_logprobs": 2},
        {"messages": [{"role": "system", "content": "s"}, *USER]},
        {"messages": [{"role": "developer", "content": "s"}]},
        _user({"type": "text", "text": "hi"}), {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "text"}}, {"reasoning_effort": "low"}, {"store": True, "metadata": {"a": "b"}},
    )  # fmt: skip
    yield from good(CHAT, ChatCompletion, _user({"type": "image_url", "image_url": {"url": IMAGE}}), server="fake")
    yield from good(
        CHAT, ChatCompletionChunk, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "n": 2}, {"stream": True, **spoken, "audio": {"voice": "sine", "format": "pcm16"}},
    )  # fmt: skip
    yield from bad(
        CHAT,
        ({"messages": []}, VALUE, "messages"),
        ({"messages": "hi"}, TYPE, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, UNSUPPORTED, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, MISSING, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, MISSING, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, MISSING, "messages[0].tool_call_id"),
        ({"messages": [*USER, {"role": "user", "content": "y", "colour": 1}]},
         UNKNOWN, "messages[1].colour"),
        (_user({"type": "poem", "text": "x"}), UNSUPPORTED, "messages[0].content[0].type"),
        (_user({"type": "text"}), MISSING, "messages[0].content[0].text"),
        ({"modalities": ["text", "audio"]}, MISSING, "audio"),
        ({"audio": {"voice": "sine", "format": "wav"}}, VALUE, "audio"),
        ({**spoken, "audio": {"voice": "bob", "format": "wav"}}, VALUE, "audio.voice"),
        ({**spoken, "audio": {"voice": "sine", "format": "midi"}}, UNSUPPORTED, "audio.format"),
        ({**spoken, "stream": True}, UNSUPPORTED, "audio.format"),
        ({"modalities": ["smell"]}, UNSUPPORTED, "modalities[0]"),
        ({"modalities": []}, VALUE, "modalities"),
        ({"top_logprobs": 3}, VALUE, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, VALUE, "top_logprobs"),
        ({"tools": [{"type": "web"}]}, UNSUPPORTED, "tools[0]"),
        ({"tools": [{"type": "function"}]}, MISSING, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, VALUE, "tools[0].function.name"),
        ({"tool_choice": "required"}, VALUE, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, VALUE,
         "tool_choice.function.name"),
        ({"response_format": {"type": "xml"}}, UNSUPPORTED, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, MISSING, "response_format.json_schema.schema"),
        (_extra(min_tokens=3), UNSUPPORTED, "min_tokens"),
        (_extra(language="xx"), VALUE, "language"),
        (_extra(speed=5), VALUE, "speed"),
        (_extra(size="big"), VALUE, "size"),
    )  # fmt: skip
    yield from bad(
        CHAT, (_user({"type": "image_url", "image_url": {"url": IMAGE}}), UNSUPPORTED,
               "messages[0].content[0].image_url.url"), server="toy",
    )  # fmt: skip
    yield from bad(
        CHAT,
        (_user({"type": "image_url", "image_url": {"url": "ftp://x/y"}}), "invalid_image_url",
         "messages[0].content[0].image_url.url"),
        (_user({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}), "invalid_image",
         "messages[0].content[0].image_url.url"),
        (_user({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}), "invalid_audio",
         "messages[0].content[0].input_audio.data"),
        server="fake",
    )  # fmt: skip


def _completions() -> Iterator[Call]:
    yield from good(
        COMPLETE, Completion, {"prompt": ["a", "b"]}, {"echo": False}, {"best_of": 1}, {"logprobs": 0},
        {"suffix": None},
        {"prompt": ["a", "b"], "n": 2, "max_tokens": 3},
    )  # fmt: skip
    # the SDK has no type of its own for chunks, whose finish reason is null until the end
    yield from good(COMPLETE, dict[str, Any], {"stream": True, "stream_options": {"include_usage": True}})
    yield from bad(
        COMPLETE,
        ({"echo": True}, UNSUPPORTED, "echo"), ({"suffix": "x"}, UNSUPPORTED, "suffix"),
        ({"best_of": 2}, UNSUPPORTED, "best_of"), ({"prompt": [1, 2]}, UNSUPPORTED, "prompt"),
        ({"prompt": [[1], [2]]}, UNSUPPORTED, "prompt"), ({"prompt": ""}, VALUE, "prompt"),
        ({"prompt": []}, VALUE, "prompt"),
        ({"prompt": 5}, TYPE, "prompt"), ({"logprobs": 6}, VALUE, "logprobs"),
        ({"prompt": ["x"] * 129}, VALUE, "prompt"), (_extra(tools=[TOOL]), UNKNOWN, "tools"),
    )  # fmt: skip


def _responses() -> Iterator[Call]:
    function = {"type": "function", **TOOL["function"]}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    yield from good(
        RESPOND, Response, {"max_output_tokens": 3}, {"instructions": "Be brief."}, {"store": False},
        {"metadata": {"a": "b"}}, {"input": USER}, {"reasoning": {"effort": "low"}}, {"truncation": "disabled"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]}, {"tool_choice": "none"},
        {"include": ["message.output_text.logprobs"]}, {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"background": False}, {"previous_response_id": None}, {"service_tier": "auto"}, {"top_logprobs": 3},
        {"tools": [function], "tool_choice": "none"}, {"text": {"format": {"type": "text"}}},
        {"input": [*USER, {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1", "content": [
            {"type": "output_text", "text": "x", "annotations": []}]}, *USER]},
    )  # fmt: skip
    yield from good(RESPOND, ResponseStreamEvent, {"stream": True}, {"stream": True, "max_output_tokens": 3})
    yield from bad(
        RESPOND,
        ({"background": True}, UNSUPPORTED, "background"),
        ({"truncation": "auto"}, UNSUPPORTED, "truncation"),
        ({"truncation": "some"}, UNSUPPORTED, "truncation"),
        ({"conversation": "conv_1"}, UNSUPPORTED, "conversation"),
        ({"prompt": {"id": "p"}}, UNSUPPORTED, "prompt"),
        ({"include": ["file_search_call.results"]}, UNSUPPORTED, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, UNSUPPORTED, "tools[0].type"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, UNSUPPORTED, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, MISSING, "tools[0].name"),
        ({"tool_choice": "required"}, VALUE, "tool_choice"),
        ({"tools": [function], "tool_choice": {"type": "function", "name": "g"}}, VALUE, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, UNSUPPORTED, "tool_choice.type"),
        ({"input": 5}, TYPE, "input"),
        ({"input": []}, VALUE, "input"),
        ({"input": [{"type": "mcp_call"}]}, UNSUPPORTED, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, UNSUPPORTED, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, UNSUPPORTED,
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f", "image_url": IMAGE}]}]},
         UNSUPPORTED, "input[0].content[0].file_id"),
        ({"input": [{**item, "call_id": None}]}, MISSING, "input[0].call_id"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, MISSING, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, UNSUPPORTED, "text.format.type"),
        ({"max_output_tokens": 0}, VALUE, "max_output_tokens"),
        ({"metadata": {"a": "b" * 600}}, VALUE, "metadata.a"),
        ({"top_logprobs": 21}, VALUE, "top_logprobs"),
        (_extra(max_tokens=5), UNKNOWN, "max_tokens"),
        (_extra(modalities=["audio"]), UNKNOWN, "modalities"),
    )  # fmt: skip
    gone = {"previous_response_id": "resp_" + "0" * 40}
    yield Call(RESPOND, {**BASES[RESPOND], **gone}, 404, "previous_response_not_found", "previous_response_id")
    reference = {"input": [{"type": "item_reference", "id": "msg_1"}]}
    yield Call(RESPOND, reference, 404, "item_not_found", "input[0].id")
    for method in ("responses.retrieve", "responses.delete"):
        yield Call(method, {"response_id": "resp_1"}, 404, "response_not_found", "response_id")


def _audio() -> Iterator[Call]:
    speak, transcribe = "audio.speech.create", "audio.transcriptions.create"
    base = {"input": "one two", "voice": "sine"}
    for file_format in ("mp3", "opus", "aac", "flac", "wav", "pcm"):
        yield Call(speak, {**base, "response_format": file_format}, shape=bytes)
    yield Call(speak, {**base, "speed": 2.0, "voice": {"id": "sine"}}, shape=bytes)
    for args, code, param in (
        ({"voice": "bob"}, VALUE, "voice"),
        ({"input": " "}, MISSING, "input"),
        ({"input": "x" * 4097}, VALUE, "input"),
        ({"speed": 4.5}, VALUE, "speed"),
        ({"response_format": "midi"}, UNSUPPORTED, "response_format"),
        ({"stream_format": "tape"}, UNSUPPORTED, "stream_format"),
        ({"instructions": "whisper"}, VALUE, "instructions"),
        (_extra(volume=3), UNKNOWN, "volume"),
    ):
        yield Call(speak, {**base, **args}, 400, code, param)
    file = ("a.wav", WAV)
    for args, shape in (
        ({}, Transcription),
        ({"language": "en"}, Transcription),
        ({"response_format": "verbose_json"}, TranscriptionVerbose),
        ({"response_format": "srt"}, bytes),
        ({"response_format": "vtt"}, bytes),
        ({"response_format": "text"}, bytes),
        ({"prompt": "x", "temperature": 0.5}, Transcription),
    ):
        yield Call(transcribe, {"file": file, **args}, shape=shape, server="fake")
    for args, code, param in (
        ({"response_format": "midi"}, UNSUPPORTED, "response_format"),
        ({"temperature": 2}, VALUE, "temperature"),
        ({"timestamp_granularities": ["word"]}, VALUE, "timestamp_granularities[]"),
        ({"file": ("a.wav", b"nothing")}, "invalid_audio", "file"),
        (_extra(colour="red"), UNKNOWN, "colour"),
    ):
        yield Call(transcribe, {"file": file, **args}, 400, code, param, server="fake")
    yield Call("audio.translations.create", {"file": file}, 400, UNSUPPORTED, "model")


def _images() -> Iterator[Call]:
    draw, edit = "images.generate", "images.edit"
    yield from good(
        draw, ImagesResponse, {"prompt": "a fox"}, {"prompt": "a fox", "n": 2, "size": "16x16"},
        {"prompt": "a fox", "output_format": "jpeg", "output_compression": 50}, {"prompt": "a fox", "quality": "high"},
        {"prompt": "a fox", "response_format": "url"}, {"prompt": "a fox", **_extra(num_inference_steps=2, seed=3)},
        server="fake",
    )  # fmt: skip
    for args, code, param in (
        ({"n": 11}, VALUE, "n"),
        ({"size": "large"}, VALUE, "size"),
        ({"output_format": "gif"}, UNSUPPORTED, "output_format"),
        ({"background": "transparent"}, UNSUPPORTED, "background"),
        ({"prompt": "x" * 32_001}, VALUE, "prompt"),
        (_extra(num_inference_steps=0), VALUE, "num_inference_steps"),
        (_extra(vae_use_tiling=True), UNSUPPORTED, "vae_use_tiling"),
        (_extra(steps=3), UNKNOWN, "steps"),
    ):
        yield Call(draw, {"prompt": "a fox", **args}, 400, code, param)
    yield Call(draw, {"prompt": "a fox"}, 400, VALUE, "model", server="toy")
    yield Call(edit, {"image": ("a.png", PNG), "prompt": "x", "n": 0}, 400, VALUE, "n", server="fake")
    yield Call(edit, {"image": ("a.png", b"x"), "prompt": "x"}, 400, "invalid_image", "image", server="fake")


def _others() -> Iterator[Call]:
    embed = "embeddings.create"
    yield from bad(
        embed, ({"input": "x"}, UNSUPPORTED, "model"), ({"input": ["x", "y"], "dimensions": 8}, UNSUPPORTED, "model"),
        ({"input": []}, VALUE, "input"), ({"input": "x", "dimensions": 0}, VALUE, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, UNSUPPORTED, "encoding_format"),
    )  # fmt: skip
    yield Call(embed, {"input": "x", "model": "nothing"}, 404, "model_not_found", "model")
    yield Call("models.list", {}, shape=dict[str, Any])
    yield Call("models.retrieve", {"model": "toy"}, shape=Model, server="toy")
    yield Call("models.retrieve", {"model": "nothing"}, 404, "model_not_found", "model")
    for path in ("/nothing", "/chat", "/threads", "/files", "/batches", "/realtime/calls"):
        yield Call("get", {"path": path}, 404, "unknown_url")
    for path in ("/chat/completions", "/completions", "/responses", "/embeddings", "/images/generations"):
        yield Call("get", {"path": path}, 405, "method_not_allowed")
    yield Call("post", {"path": "/models", "body": {}}, 405, "method_not_allowed")
    yield Call("post", {"path": "/audio/voices", "body": {}}, 403, "uploads_disabled", kind="permission_error")
    for path in ("/chat/completions", "/completions", "/responses", "/embeddings", "/audio/speech"):
        yield Call("post", {"path": path, "body": [1]}, 400, "invalid_json")
        yield Call("post", {"path": path, "body": {"model": "x"}}, 400, MISSING, _FIRST[path])


_FIRST = {
    "/chat/completions": "messages", "/completions": "prompt", "/responses": "input", "/embeddings": "input",
    "/audio/speech": "input",
}  # fmt: skip

CALLS = (*_sampling(), *_chat(), *_completions(), *_responses(), *_audio(), *_images(), *_others())


def calls_for(server: Server) -> list[Any]:
    """The rows that hold for a server, as parameters of a test."""
    import pytest

    found = [call for call in CALLS if call.server in ("both", server)]
    return [pytest.param(call, id=f"{number} {call.name}") for number, call in enumerate(found)]
