# SPDX-License-Identifier: Apache-2.0
"""The body of /v1/chat/completions → a checked ChatCall. Every field is read here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton_omni.backends.wire import GenerateRequest, ImageParams, Sampling
from triton_omni.openai.endpoints import extras, image_request
from triton_omni.openai.endpoints.messages import Reader
from triton_omni.openai.endpoints.tools import read_tools
from triton_omni.openai.http.calls import Call
from triton_omni.openai.http.errors import invalid, missing, unsupported
from triton_omni.openai.http.fields import IGNORED, Fields
from triton_omni.openai.media.audio import MEDIA_TYPES

MAX_STOPS = 4
MAX_TOKENS = 1 << 24
MAX_CHOICES = 16
MODALITIES = ("text", "audio", "image")
AUDIO_FORMATS = tuple(k for k in MEDIA_TYPES if k != "pcm")
PARAMS = image_request.PARAMS | {
    "speech.voice": "audio.voice", "sampling.json_schema": "response_format", "sampling.logprobs": "top_logprobs",
}  # fmt: skip


@dataclass(frozen=True)
class ChatCall:
    """A chat as the client wants it answered.

    audio_format  None: no speech; else the text comes as the transcript of speech
    top_logprobs  None: no log-probabilities
    one_call      of function calls only the first one is told
    """

    call: Call
    is_stream: bool
    with_usage: bool
    audio_format: str | None
    top_logprobs: int | None
    one_call: bool


async def read_chat(fields: Fields, reader: Reader) -> ChatCall:
    """The call. Raises ApiError naming the parameter."""
    model = fields.text("model", needed=True) or ""
    raw_messages = fields.items("messages", needed=True) or []
    is_stream, with_usage = _stream(fields)
    modalities = _modalities(fields)
    voice, audio_format = _audio(fields, modalities, is_stream)
    top_logprobs = _logprobs(fields)
    runs = fields.integer("n", 1, MAX_CHOICES) or 1
    limit, limit_param = _max_tokens(fields)
    sampling = _sampling(fields, limit, top_logprobs)
    tools, tool_choice = read_tools(fields)
    one_call = fields.has("parallel_tool_calls") and not fields.flag("parallel_tool_calls")
    options = extras.request(fields)
    drawing = image_request.drawing_options(fields)
    speech = extras.speech(fields, voice)
    reader.with_video_audio = _video_audio(fields)
    fields.nothing_else(IGNORED)
    messages = await reader.read(raw_messages)
    request = GenerateRequest(
        operation="chat",
        messages=messages,
        modalities=modalities,
        sampling=sampling,
        image=ImageParams(**drawing),
        speech=speech,
        tools=tools,
        tool_choice=tool_choice,
        **options,
    )
    params = PARAMS | {"sampling.max_tokens": limit_param}
    call = Call(model, request, params, reader.media.tensors, runs)
    return ChatCall(call, is_stream, with_usage, audio_format, top_logprobs, one_call)


def _sampling(fields: Fields, limit: int | None, top_logprobs: int | None) -> Sampling:
    return Sampling(
        max_tokens=limit,
        stop=_stop(fields),
        json_schema=_json_schema(fields),
        temperature=fields.number("temperature", 0, 2),
        top_p=_top_p(fields),
        frequency_penalty=fields.number("frequency_penalty", -2, 2),
        presence_penalty=fields.number("presence_penalty", -2, 2),
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        logit_bias=_logit_bias(fields),
        logprobs=top_logprobs,
        **extras.sampling(fields),
    )


def _stream(fields: Fields) -> tuple[bool, bool]:
    is_stream = fields.flag("stream")
    options = fields.inner("stream_options")
    if options is None:
        return is_stream, False
    if not is_stream:
        raise invalid("stream_options", "'stream_options' is only for streams: set 'stream' to true.")
    with_usage = options.flag("include_usage")
    options.flag("include_obfuscation")
    options.nothing_else()
    return is_stream, with_usage


def _video_audio(fields: Fields) -> bool:
    """vLLM's option to read the audio track of a video together with its frames."""
    options = fields.inner("mm_processor_kwargs")
    if options is None:
        return False
    wanted = options.flag("use_audio_in_video")
    options.nothing_else()
    return wanted


def _modalities(fields: Fields) -> tuple[str, ...]:
    """Outputs wanted; none: what the pipeline's chat makes if nobody asks. Speech brings its transcript along."""
    modalities = fields.items("modalities")
    if modalities is None:
        return ()
    if not modalities:
        raise invalid("modalities", "'modalities' must name at least one output.")
    for i, modality in enumerate(modalities):
        if modality not in MODALITIES:
            raise unsupported(f"modalities[{i}]", f"Modality {modality!r} is not one of {', '.join(MODALITIES)}.")
    wanted = {*modalities, "text"} if "audio" in modalities else set(modalities)
    return tuple(modality for modality in MODALITIES if modality in wanted)


def _audio(fields: Fields, modalities: tuple[str, ...], is_stream: bool) -> tuple[str | None, str | None]:
    """(voice, format); (None, None) for no speech."""
    audio = fields.inner("audio")
    if "audio" not in modalities:
        if audio is not None:
            raise invalid("audio", "'audio' is only for answers with speech: add 'audio' to 'modalities'.")
        return None, None
    if audio is None:
        raise missing("audio")
    kind = audio.choice("format", AUDIO_FORMATS)
    if kind is None:
        raise missing("audio.format")
    if is_stream and kind != "pcm16":
        raise unsupported("audio.format", f"Streams carry audio as 'pcm16', not '{kind}'.")
    voice = voice_of(audio)
    audio.nothing_else()
    return voice, kind


def voice_of(fields: Fields) -> str:
    """A voice's name, given as a string or as {"id": name}."""
    value = fields.take("voice")
    if isinstance(value, dict):
        value = value.get("id")
    if value is None:
        raise missing(fields.name("voice"))
    if not isinstance(value, str) or not value:
        raise invalid(fields.name("voice"), "A voice is named by a string.", "invalid_type")
    return value


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, 20)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    return (top or 0) if wanted else None


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    """(limit, the parameter that gave it); the newer name wins."""
    newer = fields.integer("max_completion_tokens", 1, MAX_TOKENS)
    older = fields.integer("max_tokens", 1, MAX_TOKENS)
    return (newer, "max_completion_tokens") if newer is not None else (older, "max_tokens")


def _top_p(fields: Fields) -> float | None:
    top_p = fields.number("top_p", 0, 1)
    return 1e-6 if top_p == 0 else top_p  # OpenAI allows 0 for "the most probable token"; ours is greater than 0


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise invalid("stop", "'stop' must be a string or an array of strings.", "invalid_type")
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"'stop' may have {MAX_STOPS} strings, not {len(stops)}.")
    if "" in stops:
        raise invalid("stop", "A stop string must not be empty.")
    return tuple(stops)


def _logit_bias(fields: Fields) -> dict[str, float]:
    bias = fields.record("logit_bias") or {}
    inner = Fields(bias, "logit_bias")
    for token in bias:
        if not (token.isascii() and token.isdecimal()):
            raise invalid("logit_bias", f"'logit_bias' has token ids as keys, not {token!r}.")
    return {token: inner.number(token, -100, 100) or 0.0 for token in bias}


def _json_schema(fields: Fields) -> dict[str, Any] | None:
    form = fields.inner("response_format")
    if form is None:
        return None
    kind = form.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise missing("response_format.type")
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    outer = form.inner("json_schema")
    schema = None if outer is None else outer.record("schema")
    if schema is None:
        raise missing("response_format.json_schema.schema")
    return schema
