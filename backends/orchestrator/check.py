# SPDX-License-Identifier: Apache-2.0
"""What can be said about a request before any stage works. Everything here raises BadRequest naming the field."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import MAX_REQUEST_ID_CHARS, GenerateRequest, Part
from triton_omni.backends.core.hints import nearest
from triton_omni.backends.core.pipeline import MEDIA, Pipeline, RequestPlan


def check_request_id(request_id: str) -> None:
    """A request id is up to 256 printable characters."""
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise BadRequest(f"request id must be at most {MAX_REQUEST_ID_CHARS} characters (got {len(request_id)})", "id")
    if not request_id.isprintable():
        raise BadRequest("request id must be printable", "id")


def check_request(
    pipeline: Pipeline,
    request: GenerateRequest,
    media: Mapping[str, int],
    engine: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> RequestPlan:
    """Check a request against its pipeline; returns what it takes. `media` gives the number of elements of each media
    tensor sent, `engine` the engine options of stages that check requests."""
    pipeline.operation(request)
    _check_kinds(pipeline, request)
    _check_stages(pipeline, request)
    pipeline.check(request)
    plan = pipeline.plan(request)
    pipeline.check_params(request)
    for stage in pipeline.stages:
        if stage.name in plan.needed:
            stage.check(request, engine.get(stage.name, {}))
    _check_media(request, media)
    unused = [name for name in MEDIA if media.get(name) and name not in request.media()]
    if unused:
        raise BadRequest(f"tensor '{unused[0]}' was sent but no message part refers to it", unused[0])
    return plan


def _check_stages(pipeline: Pipeline, request: GenerateRequest) -> None:
    names = [stage.name for stage in pipeline.stages]
    for stage in request.stages:
        if stage not in names:
            raise BadRequest(
                f"unknown stage '{stage}'; stages: {', '.join(names)}{nearest(stage, names)}", f"stages.{stage}"
            )


def _check_kinds(pipeline: Pipeline, request: GenerateRequest) -> None:
    for i, message in enumerate(request.messages):
        for j, part in enumerate(message.parts):
            if part.type not in pipeline.media:
                taken = ", ".join(pipeline.media)
                raise BadRequest(f"'{pipeline.name}' takes {taken}, not {part.type}", f"messages[{i}].content[{j}]")


def _check_media(request: GenerateRequest, media: Mapping[str, int]) -> None:
    """Slices are inside their tensors, and together no larger: each is copied, so that one shown a thousand times
    would outgrow every bound on what is sent."""
    covered: Counter[str] = Counter()
    for i, message in enumerate(request.messages):
        for j, part in enumerate(message.parts):
            if part.type == "text":
                continue
            field = f"messages[{i}].content[{j}]"
            covered[part.type] += _check_slice(part, field, media)
            if covered[part.type] > media[part.type]:
                raise BadRequest(
                    f"parts of tensor '{part.type}' overlap; send a slice that is used twice two times", field
                )


def _check_slice(part: Part, field: str, media: Mapping[str, int]) -> int:
    """Its length, in elements."""
    available = media.get(part.type)
    if available is None:
        raise BadRequest(f"a part of type '{part.type}' needs the input tensor '{part.type}'", field)
    if part.type != "audio" and (not part.shape or min(part.shape) < 1):
        raise BadRequest(f"shape must be positive sizes, not {list(part.shape)}", f"{field}.shape")
    length = part.length if part.type == "audio" else math.prod(part.shape)
    if length < 1 or part.offset + length > available:
        raise BadRequest(
            f"the part covers elements {part.offset} to {part.offset + length} of tensor '{part.type}', "
            f"which has {available}",
            field,
        )
    if part.type == "audio" and not part.sample_rate:
        raise BadRequest("an audio part needs a sample_rate", f"{field}.sample_rate")
    return length
