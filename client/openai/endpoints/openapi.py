# SPDX-License-Identifier: Apache-2.0
"""GET /openapi.json, generated from the body structs. Run this module with a file name to write it there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from triton_omni.openai.endpoints import schemas
from triton_omni.openai.endpoints.schemas import Json
from triton_omni.openai.http.parsing import Strict
from triton_omni.openai.realtime.events import ClientSecretBody

BODIES: dict[str, type[Strict]] = {
    "/v1/chat/completions": schemas.ChatBody,
    "/v1/responses": schemas.ResponsesBody,
    "/v1/completions": schemas.CompletionBody,
    "/v1/embeddings": schemas.EmbeddingBody,
    "/v1/audio/speech": schemas.SpeechBody,
    "/dev/captioned_speech": schemas.CaptionedSpeechBody,
    "/v1/audio/voice_consents/{name}": schemas.ConsentNameBody,
    "/v1/images/generations": schemas.ImageBody,
    "/v1/realtime/client_secrets": ClientSecretBody,
}
FORMS: dict[str, tuple[type[Strict], Json]] = {
    "/v1/audio/transcriptions": (schemas.TranscriptionBody, {"file": {"type": "string", "format": "binary"}}),
    "/v1/audio/voices": (schemas.VoiceBody, {"audio_sample": {"type": "string", "format": "binary"}}),
    "/v1/audio/voice_consents": (schemas.ConsentBody, {"recording": {"type": "string", "format": "binary"}}),
    "/v1/images/edits": (
        schemas.EditBody,
        {
            "image": {"type": "array", "items": {"type": "string", "format": "binary"}},
            "mask": {"type": "string", "format": "binary"},
        },
    ),
}
ITEMS = {
    "/v1/models/{model}": ("get",),
    "/v1/events/{request}": ("get",),
    "/v1/responses/{response}": ("get", "delete"),
    "/v1/audio/voices/{name}": ("get", "delete"),
    "/v1/audio/voice_consents/{name}": ("get", "delete"),
}
"""Paths with a name in them → their methods without a body."""
LISTS = (
    "/v1/audio/voice_consents",
    "/v1/models",
    "/v1/audio/models",
    "/v1/audio/voices",
    "/v1/events",
    "/health",
    "/metrics",
    "/openapi.json",
)
REF = "#/components/schemas/"
ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"}, "code": {"type": "string"},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}  # fmt: skip


async def show(request: Request) -> Response:
    """GET /openapi.json"""
    return Response(document(), media_type="application/json")


@functools.cache
def document() -> bytes:
    """The description of all routes, as JSON."""
    kinds = [*BODIES.values(), *(kind for kind, _ in FORMS.values())]
    _, components = msgspec.json.schema_components(kinds, ref_template=REF + "{name}")
    for kind in _described(components):
        components[kind.__name__]["properties"] |= {name: {} for name in sorted(kind.ignored_fields)}
    components |= {"Error": ERROR}
    for kind, files in FORMS.values():
        form = components[kind.__name__]
        form["properties"] |= files
        form["required"] = [*form["required"], next(iter(files))]
    bodies = [("application/json", path, kind) for path, kind in BODIES.items()]
    bodies += [("multipart/form-data", path, kind) for path, (kind, _) in FORMS.items()]
    value: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Triton-Omni", "version": "1", "description": "OpenAI's API over pipelines in Triton."},
        "paths": _paths(bodies),
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _paths(bodies: Iterable[tuple[str, str, type[Strict]]]) -> Json:
    paths: dict[str, Json] = {}
    for media, path, kind in bodies:
        paths.setdefault(path, {})["post"] = _operation(media, kind)
    for path in LISTS:
        paths.setdefault(path, {})["get"] = _operation()
    for path, methods in ITEMS.items():
        for method in methods:
            paths.setdefault(path, {})[method] = _operation()
    for path, operations in paths.items():
        for operation in operations.values() if "{" in path else ():
            operation["parameters"] = [_in_path(path.partition("{")[2].partition("}")[0])]
    return paths


def _in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _described(components: Json) -> list[type[Strict]]:
    """All body structs and inner objects that are described."""
    found, pending = list[type[Strict]](), [Strict]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        found += [kind] if kind.__name__ in components else []
    return found


def _operation(media: str = "", kind: type[Strict] | None = None) -> Json:
    error = {"description": "Error", "content": {"application/json": {"schema": {"$ref": f"{REF}Error"}}}}
    operation: Json = {"responses": {"200": {"description": "Success"}, "4XX": error, "503": error}}
    if kind is None:
        return operation
    content = {media: {"schema": {"$ref": f"{REF}{kind.__name__}"}}}
    return {**operation, "requestBody": {"required": True, "content": content}}


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(document())
