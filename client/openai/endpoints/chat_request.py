# SPDX-License-Identifier: Apache-2.0
"""The body of /v1/chat/completions → a checked ChatCall. The types check single fields; here is what spans several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from triton_omni.backends.wire import Deadlines, GenerateRequest, Sampling, SpeechParams
from triton_omni.openai.endpoints import image_request
from triton_omni.openai.endpoints.messages import MessageReader
from triton_omni.openai.endpoints.schemas import ChatBody, CompletionBody, Json, NamedToolChoice, VoiceId
from triton_omni.openai.http.calls import BackendCall
from triton_omni.openai.http.context import RequestContext
from triton_omni.openai.http.errors import invalid, missing, unsupported

MODALITIES = ("text", "audio", "image")
MIN_TOP_P = 1e-6
_REGIONAL = re.compile(r"[A-Za-z]{2}([-_][A-Za-z]{4})?([-_]([A-Za-z]{2}|[0-9]{3}))?")
"""BCP 47: language, script, region."""
PARAMS = image_request.PARAMS | {
    "speech.voice": "audio.voice", "sampling.json_schema": "response_format", "sampling.logprobs": "top_logprobs",
}  # fmt: skip


@dataclass(frozen=True)
class ChatCall:
    """A checked chat.

    audio_format  None: no audio; else the text is sent as the transcript of the audio
    top_logprobs  None: no log-probabilities
    one_call      only the first function call is sent
    """

    call: BackendCall
    is_stream: bool
    with_usage: bool
    audio_format: str | None
    top_logprobs: int | None
    one_call: bool


async def read_chat(body: ChatBody, context: RequestContext, params: Sequence[str] = ()) -> ChatCall:
    """The call. Raises ApiError naming the parameter; `params` are other names of the messages than `messages[i]`."""
    with_usage = wants_usage(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    if body.chat_template_kwargs is not None and body.chat_template_kwargs.enable_thinking:
        raise unsupported("chat_template_kwargs.enable_thinking", "No model here has a thinking mode.")
    modalities = _modalities(body)
    audio_format = _audio_format(body, modalities)
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = sampling_of(body, limit, top_logprobs, _json_schema(body))
    tools, tool_choice = _tools(body)
    image = image_request.image_params(body)
    wants_audio = body.mm_processor_kwargs is not None and body.mm_processor_kwargs.use_audio_in_video is True
    reader = MessageReader(context, body.model, with_video_audio=wants_audio)
    messages = await reader.read(body.messages, params)
    voice = None if body.audio is None else context.services.voice_of(name_of(body.audio.voice))
    request = GenerateRequest(
        operation="chat",
        messages=messages,
        modalities=modalities,
        sampling=sampling,
        image=image,
        speech=SpeechParams(voice, language_of(body.language), body.speed or 1.0),
        tools=tools,
        tool_choice=tool_choice,
        stages=body.stages or {},
        deadlines=body.deadlines or Deadlines(),
        priority=body.priority or 0,
    )
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    call = BackendCall(
        body.model, request, PARAMS | {"sampling.max_tokens": limit_name}, reader.media.tensors, body.n or 1
    )
    return ChatCall(
        call, body.stream is True, with_usage, audio_format, top_logprobs, body.parallel_tool_calls is False
    )


def wants_usage(body: ChatBody | CompletionBody) -> bool:
    """True if the stream ends with a chunk of its usage. Raises ApiError."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise invalid("stream_options", "'stream_options' is only for streams: set 'stream' to true.")
    return body.stream_options.include_usage is True


def sampling_of(
    body: ChatBody | CompletionBody, max_tokens: int | None, top_logprobs: int | None, json_schema: Json | None = None
) -> Sampling:
    """How tokens are chosen. Raises ApiError naming the parameter."""
    if body.min_tokens:
        raise unsupported("min_tokens", "'min_tokens' is not supported; 'ignore_eos' with 'max_tokens' fixes a length.")
    stop = body.stop or ()
    return Sampling(
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        json_schema=json_schema,
        temperature=body.temperature,
        top_p=MIN_TOP_P if body.top_p == 0 else body.top_p,  # OpenAI allows 0: the most probable token
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        seed=body.seed,
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=top_logprobs,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        ignore_eos=body.ignore_eos is True,
    )


def _modalities(body: ChatBody) -> tuple[str, ...]:
    """Outputs wanted; empty: what the pipeline's chat makes by default. Audio includes its transcript."""
    wanted = set(body.modalities or ())
    wanted |= {"text"} if "audio" in wanted else set()
    return tuple(modality for modality in MODALITIES if modality in wanted)


def _audio_format(body: ChatBody, modalities: tuple[str, ...]) -> str | None:
    """The audio's format; None for no audio."""
    if "audio" not in modalities:
        if body.audio is not None:
            raise invalid("audio", "'audio' is only for answers with audio: add 'audio' to 'modalities'.")
        return None
    if body.audio is None:
        raise missing("audio")
    if body.stream and body.audio.format != "pcm16":
        raise unsupported("audio.format", f"Streams carry audio as 'pcm16', not '{body.audio.format}'.")
    return body.audio.format


def language_of(tag: str | None) -> str | None:
    """The language of a tag with a script or region, such as en-US or zh_Hans; None for ""; other names as they are."""
    return (tag[:2] if tag and _REGIONAL.fullmatch(tag) else tag) or None


def name_of(voice: str | VoiceId) -> str:
    """A voice's name, sent as a string or as {"id": name}."""
    return voice if isinstance(voice, str) else voice.id


def _logit_bias(bias: dict[str, float]) -> dict[str, float]:
    for token in bias:
        if not (token.isascii() and token.isdecimal()):
            raise invalid("logit_bias", f"'logit_bias' has token ids as keys, not {token[:100]!r}.")
    return bias


def _json_schema(body: ChatBody) -> Json | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise missing("response_format.json_schema.schema")
    return wanted.json_schema.schema


def _tools(body: ChatBody) -> tuple[tuple[Json, ...], str]:
    """(tools, choice) as the wire has them."""
    names: list[str] = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise unsupported(f"tools[{i}]", "Only tools of the type 'function' are supported.")
        if tool.function is None:
            raise missing(f"tools[{i}].function")
        names.append(tool.function.name)
    choice = body.tool_choice
    if choice == "none":
        return (), "auto"
    tools: tuple[Json, ...] = tuple(msgspec.to_builtins(tool) for tool in body.tools or ())
    if choice is None or choice == "auto":
        return tools, "auto"
    if not tools:
        raise invalid("tool_choice", "'tool_choice' needs 'tools'.")
    if isinstance(choice, str):
        if choice not in ("auto", "required"):
            raise unsupported("tool_choice", "'tool_choice' may be 'none', 'auto', 'required' or name one function.")
        return tools, choice
    return tools, _named(choice, names)


def _named(choice: NamedToolChoice, names: list[str]) -> str:
    """The function in {"type": "function", "function": {"name": …}}."""
    param = "tool_choice.function.name"
    if choice.type != "function":
        raise unsupported("tool_choice", "'tool_choice' may be 'none', 'auto', 'required' or name one function.")
    if choice.function is None or choice.function.name is None:
        raise missing(param)
    name = choice.function.name
    if name in ("auto", "required"):
        raise unsupported(param, f"A function named '{name}' can be offered, not forced.")
    if name not in names:
        raise invalid(param, f"There is no function '{name}' in 'tools'.")
    return name
