# SPDX-License-Identifier: Apache-2.0
"""Valid requests of all routes of docs/openapi.json, and seeded mutations of their values, forms, bytes and headers."""

from __future__ import annotations

import base64
import copy
import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import msgspec
import numpy as np
from PIL import Image

from triton_omni.openai.endpoints.openapi import BODIES, FORMS, ITEMS, LISTS
from triton_omni.openai.media import audio as coding

WAV = coding.encode("wav", 16_000, [np.zeros(4000, np.float32)])
VOICE = coding.encode("wav", 8_000, [np.tile(np.array([0.5, -0.5], np.float32), 4000)])
UPLOADS = ("/v1/audio/voices", "/v1/audio/voice_consents")
KEPT = "kept"
"""Name of the voice and of the consent that `preparations` make and no mutant deletes."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 0.5, 2.0, -0.0, 1e308, 2**31, 2**63, -(2**63) - 1, 10**30, "", " ", "x", "auto",
    "\x00", "\ud83d", "🦊" * 50, "é" * 5000, "1024x1024", "-1", "null", "data:,", "data:image/png;base64,AAAA", "{",
    "[]", [], {}, [[]], [None], [{}], {"": 1}, {"type": "text"}, {"type": "json_schema"}, ["text", "audio"],
    {"id": "x"}, [1] * 3000,
]  # fmt: skip

HEADER_NAMES = ("content-type", "content-encoding", "x-request-id", "traceparent", "accept", "expect", "authorization")
CHARSETS = [
    b"multipart/form-data; boundary=b; charset=" + name for name in (b"undefined", b"utf-16", b"unicode_escape")
]
HEADER_VALUES = (b"gzip", b"text/plain", b"", b"\xff", b"x" * 300, b"multipart/form-data", *CHARSETS)


def nested(depth: int) -> Any:
    """Arrays within arrays."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "png")
    return file.getvalue()


PNG = png()


def bodies(model: str) -> dict[str, list[dict[str, Any]]]:
    """Route → valid JSON bodies."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}}
    audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {
        "/v1/chat/completions": [
            {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
            {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": True},
            {"model": model, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [
                {"type": "text", "text": "what"}, image, audio]}], "stream": True, "n": 2, "seed": 1,
             "stream_options": {"include_usage": True}, "temperature": 0.5, "top_p": 0.9, "stop": ["a"],
             "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1.0}, "deadlines": {"total_s": 9.0}},
            {"model": model, "messages": [
                {"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "y"}], "tools": [TOOL],
             "tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"model": model, "messages": [{"role": "user", "content": "x"}], "modalities": ["text", "audio"],
             "audio": {"voice": "sine", "format": "wav"}, "stages": {"words": {"hold_after": None}},
             "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        ],
        "/v1/responses": [
            {"model": model, "input": "hello", "max_output_tokens": 3, "store": False, "metadata": {"a": "b"}},
            {"model": model, "stream": True, "instructions": "s", "temperature": 0.5, "top_p": 0.9, "top_logprobs": 2,
             "input": [{"role": "user", "content": [{"type": "input_text", "text": "what"},
                        {"type": "input_image", "image_url": image["image_url"]["url"], "detail": "low"}]}],
             "include": ["message.output_text.logprobs"], "text": {"format": {"type": "text"}}},
            {"model": model, "tools": [{"type": "function", **TOOL["function"]}], "parallel_tool_calls": False,
             "tool_choice": {"type": "function", "name": "f"}, "input": [
                {"type": "message", "role": "user", "content": "x"}, {"type": "reasoning", "id": "r", "summary": []},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "y"}]},
        ],
        "/v1/completions": [
            {"model": model, "prompt": "once", "max_tokens": 3, "n": 2, "seed": 1, "logprobs": 2, "stop": ["a"],
             "echo": False, "best_of": 2},
            {"model": model, "prompt": ["once", "upon"], "stream": True, "stream_options": {"include_usage": True},
             "temperature": 0.5, "top_p": 0.9, "logit_bias": {"5": 1.0}, "deadlines": {"total_s": 9.0}},
        ],
        "/v1/audio/speech": [
            {"model": model, "input": "one two", "voice": "sine", "response_format": "wav", "speed": 1.0},
            {"model": model, "input": "one two", "voice": {"id": "sine"}, "stream_format": "sse"},
        ],
        "/dev/captioned_speech": [
            {"model": model, "input": "one two", "voice": "sine", "response_format": "wav", "speed": 1.0},
            {"model": model, "input": "one two", "voice": {"id": "sine"}, "stream": False, "return_timestamps": False},
        ],
        "/v1/embeddings": [
            {"model": model, "input": ["one", [1, 2]], "dimensions": 8, "encoding_format": "float", "user": "u"},
        ],
        "/v1/realtime/client_secrets": [
            {"session": {"type": "realtime", "model": model, "instructions": "s", "tools": [],
                         "audio": {"input": {"transcription": {"language": "en"}}, "output": {"speed": 1.0}}},
             "expires_after": {"anchor": "created_at", "seconds": 60}},
            {"session": {"type": "realtime", "model": model, "output_modalities": ["text"], "max_output_tokens": 5}},
        ],
        "/v1/audio/voice_consents/{name}": [{"name": KEPT}],
        "/v1/images/generations": [
            {"model": model, "prompt": "a fox", "size": "16x16", "n": 1, "num_inference_steps": 2, "seed": 3},
            {"model": model, "prompt": "a fox", "stream": True, "partial_images": 2, "lora": {"name": "l", "scale": 1}},
        ],
    }  # fmt: skip


def forms(model: str) -> dict[str, list[list[tuple[str, Any]]]]:
    """Route → fields of valid forms; a file is (name, bytes)."""
    audio, voice, image = ("a.wav", WAV), ("v.wav", VOICE), ("a.png", PNG)
    return {
        "/v1/audio/transcriptions": [
            [("file", audio), ("model", model), ("language", "en"), ("response_format", "verbose_json"),
             ("timestamp_granularities[]", "word"), ("chunking_strategy", "auto")],
            [("file", audio), ("model", model), ("stream", "true"), ("stages[words][n]", "1")],
        ],
        "/v1/audio/voices": [
            [("audio_sample", voice), ("name", "ann"), ("ref_text", "one two"), ("speaker_description", "calm")],
            [("audio_sample", voice), ("name", "bob"), ("consent", "cons_1")],
        ],
        "/v1/audio/voice_consents": [[("recording", voice), ("name", "ann"), ("language", "en-US")]],
        "/v1/images/edits": [
            [("image", image), ("mask", image), ("model", model), ("prompt", "x"), ("size", "16x16"), ("n", "1")],
            [("image[]", image), ("image[]", image), ("model", model), ("prompt", "x"), ("stream", "True")],
        ],
    }  # fmt: skip


ROUTES = (*bodies(""), *forms(""))
PLACES = (0, 1, 1, 2, 3)
"""Of a mutant that are changed."""
READ_ROUTES = tuple(f"GET {path}" for path in (*ITEMS, *LISTS) if path != "/v1/events")
"""Routes without a body, some of them also with DELETE; /v1/events never ends."""
REFUSING = ("/v1/embeddings", *(route for route in READ_ROUTES if "{" in route))
"""Routes that no valid request makes succeed, or of which most names do not exist."""
NAMES = (
    "", " ", ".", "..", "../x", "a/b", "voice_1", "cons_" + "0" * 32, "toy", "fake", "x" * 300, "é", "🦊", "\x00",
    "\r\n", "?", "#", "%", "*", "[", "a\ud83d", "' or 1=1 --",
)  # fmt: skip


@dataclass
class Mutant:
    """A request that may be wrong in up to three places. `path`: the route with names in place."""

    route: str
    path: str
    content: bytes = b""
    headers: dict[str, bytes] = field(default_factory=dict[str, bytes])
    method: str = "POST"

    def options(self) -> dict[str, Any]:
        """What httpx's `request` takes."""
        headers = httpx.Headers([(name.encode(), value) for name, value in self.headers.items()])
        return {"method": self.method, "url": self.path, "content": self.content, "headers": headers}


def mutants(route: str, model: str, count: int, seed: int = 0) -> Iterator[Mutant]:
    """`count` mutants of a route; the same seed makes the same ones."""
    rng = random.Random(f"{seed} {route}")
    for _ in range(count):
        if route in READ_ROUTES:
            yield _read(rng, route.removeprefix("GET "))
            continue
        mutant = _json(rng, route, model) if route in BODIES else _form(rng, route, model)
        mutant.path = _path(rng, route)
        if rng.random() < 0.1:
            mutant.content = _bytes(rng, mutant.content)
        if rng.random() < 0.1:
            mutant.headers[rng.choice(HEADER_NAMES)] = rng.choice(HEADER_VALUES)
        yield mutant


def preparations() -> Iterator[dict[str, Any]]:
    """Requests, as httpx's `request` takes them, before the mutants of a server: what they may name exists."""
    for route, file in zip(UPLOADS, ("audio_sample", "recording"), strict=True):
        data = {"name": KEPT} | ({"language": "en"} if file == "recording" else {})
        yield {"method": "POST", "url": route, "data": data, "files": {file: ("v.wav", VOICE)}}


def undoing(mutant: Mutant, response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The request that undoes what a mutant has made, so that the next one finds room and its name free."""
    if response.status_code != 200 or mutant.method != "POST" or not mutant.route.startswith(UPLOADS):
        return
    item = {"url": f"{mutant.route.removesuffix('/{name}')}/{response.json()['id']}"}
    if mutant.route in UPLOADS:
        yield {"method": "DELETE", **item}
    else:
        yield {"method": "POST", **item, "json": {"name": KEPT}}


def _json(rng: random.Random, route: str, model: str) -> Mutant:
    body = copy.deepcopy(rng.choice(bodies(model)[route]))
    for _ in range(rng.choice(PLACES)):
        _mutate(rng, body, [*BODIES[route].__struct_fields__])
    text = json.dumps(body)
    return Mutant(route, route, text.encode(), {"content-type": b"application/json"})


def _read(rng: random.Random, route: str) -> Mutant:
    """A request without a body: any name in the path, a query, a header."""
    path = _path(rng, route)
    if rng.random() < 0.3:
        path += "?" + urlencode({rng.choice(["model", "limit", "after", "", "x"]): rng.choice(NAMES)}, errors="replace")
    headers = {rng.choice(HEADER_NAMES): rng.choice(HEADER_VALUES)} if rng.random() < 0.2 else {}
    methods = ITEMS.get(route, ("get",)) if KEPT not in path else ("get",)
    return Mutant(route, path, headers=headers, method=rng.choice(methods).upper())


def _path(rng: random.Random, route: str) -> str:
    """The route with a name in place of each parameter."""
    start, brace, _ = route.partition("{")
    if not brace:
        return route
    if rng.random() < 0.5:
        return start + KEPT
    name = rng.choice(NAMES if start != "/v1/events/" else NAMES[1:])  # without a name: the stream that never ends
    return start + quote(name, safe="", errors="replace").replace(".", "%2e")


def _mutate(rng: random.Random, body: dict[str, Any], known: list[str]) -> None:
    """Change one place."""
    holders = list(_holders(body))
    holder = rng.choice(holders)
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    action = rng.random()
    if action < 0.25:
        body[rng.choice(known)] = _value(rng)
    elif action < 0.3 and isinstance(holder, dict):
        holder[rng.choice(["unknown", "", "a.b", "[0]", "🦊", "x" * 500, "a\r\nb: c"])] = _value(rng)
    elif keys:
        key = rng.choice(keys)
        if action < 0.45:
            del holder[key]
        elif action < 0.55 and isinstance(holder, list):
            holder.extend([holder[key]] * rng.choice([1, 40, 3000]))
        else:
            holder[key] = _value(rng)


def _value(rng: random.Random) -> Any:
    return nested(rng.choice([5, 99, 400])) if rng.random() < 0.03 else copy.deepcopy(rng.choice(VALUES))


def _holders(value: Any) -> Iterator[Any]:
    """All objects and arrays in a value."""
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value[:50]:
            yield from _holders(inner)


def _form(rng: random.Random, route: str, model: str) -> Mutant:
    fields = list(rng.choice(forms(model)[route]))
    known = [*FORMS[route][0].__struct_fields__]
    for _ in range(rng.choice(PLACES)):
        place = rng.randrange(len(fields)) if fields else 0
        action = rng.random()
        if action < 0.35 or not fields:
            value = rng.choice([*VALUES, "True", "false", '{"type": "server_vad"}'])
            name = rng.choice(
                [*known, *(f"{known[0]}[{known[1]}]", "unknown", "stages[a][b]", "stages[a]", "image[0]")]
            )
            fields.append((name, value if isinstance(value, str) else json.dumps(value)))
        elif action < 0.5:
            del fields[place]
        elif action < 0.6:
            fields.append(fields[place])
        else:
            name, value = fields[place]
            is_file = isinstance(value, tuple)
            fields[place] = (name, (value[0], _bytes(rng, value[1])) if is_file else rng.choice(["", "x", "1e9", "-1"]))
    safe = [(n, v if isinstance(v, tuple) else (None, v.encode("utf-8", "replace"))) for n, v in fields]
    request = httpx.Request("POST", "http://x", files=safe or [("none", (None, ""))])
    kind = request.headers["content-type"]
    charset = f"; charset={rng.choice(['utf-8', 'idna', 'utf-7', 'unicode_escape'])}" if rng.random() < 0.1 else ""
    return Mutant(route, route, request.read(), {"content-type": f"{kind}{charset}".encode()})


def _bytes(rng: random.Random, data: bytes) -> bytes:
    """The bytes with one stretch changed, missing or doubled."""
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice([1, 4, 64, 100_000]))
    middle = rng.choice([b"", rng.randbytes(end - start), data[start:end] * 2, b"\x00" * 8])
    return data[:start] + middle + data[end:]


def fault_of(response: httpx.Response) -> str:
    """What is wrong with the response to a mutant; "" for nothing."""
    status = response.status_code
    if 200 <= status < 300:
        return ""
    if not (400 <= status < 500 or (status == 503 and "retry-after" in response.headers)):
        return f"status {status}: {response.text[:300]}"
    try:
        error = msgspec.json.decode(response.content)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"status {status} without an error: {response.text[:300]}"
    return "" if set(error) == {"message", "type", "param", "code"} and error["message"] else f"incomplete: {error}"
