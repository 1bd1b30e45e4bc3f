# SPDX-License-Identifier: Apache-2.0
"""Request bodies of the OpenAI routes as structs. `openapi.json` is generated from them.

A field that is null counts as not sent. An unknown field is refused, so that a typo never passes silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from triton_omni.backends.wire import Deadlines
from triton_omni.openai.http.parsing import Strict

Json = dict[str, Any]
Names = frozenset[str]
Reasons = Mapping[str, str]

MAX_PROMPT_CHARS = 32_000
MAX_INPUT_CHARS = 4096
MAX_TEXT_CHARS = 1 << 20
MAX_TOKENS = 1 << 24
MAX_CHOICES = 16
MAX_IMAGES = 10
MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_PROMPTS = 2048
MAX_URL_CHARS = 1 << 27
"""A data URL is a URL; the body's own bound comes first."""
MAX_SEED = 2**63 - 1
SIZE_PATTERN = r"^(auto|[0-9]{1,5}x[0-9]{1,5})$"

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Prompt = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]
Url = Annotated[str, Meta(max_length=MAX_URL_CHARS)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Scale = Annotated[float, Meta(ge=0, le=100)]
LoraScale = Annotated[float, Meta(ge=-100, le=100)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Seed = Annotated[int, Meta(ge=-(2**63), le=MAX_SEED)]
Bias = Annotated[float, Meta(ge=-100, le=100)]

Role = Literal["system", "developer", "user", "assistant", "tool"]
Modality = Literal["text", "audio", "image"]
AudioFileFormat = Literal["mp3", "opus", "aac", "flac", "wav"]
InputAudioFormat = Literal[
    "wav", "mp3", "flac", "opus", "ogg", "aac", "m4a", "mp4", "webm", "mpeg", "mpga", "oga", "amr", "aiff", "caf", "au"
]
ImageQuality = Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"]


class _Common(Strict, kw_only=True):
    """What every route takes: the model and this server's own parameters."""

    model: Text
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    language: Annotated[str, Meta(max_length=100)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    deadlines: Deadlines | None = None
    stages: dict[str, Json] | None = None


class _JsonBody(_Common, kw_only=True):
    """The same, and what OpenAI's JSON bodies have beside."""

    ignored_fields: ClassVar[Names] = frozenset((
        "metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "reasoning_effort", "verbosity", "prediction", "web_search_options", "moderation",
    ))  # fmt: skip


# --- images ---


class LoraChoice(Strict, kw_only=True):
    """vLLM-Omni's form of a LoRA."""

    refused_fields: ClassVar[Reasons] = dict.fromkeys(
        ("path", "int_id"), "is in the deploy file; a LoRA is selected by 'name'."
    )
    name: Annotated[str, Meta(max_length=200)]
    scale: LoraScale | None = None


class _ImageOptions(_JsonBody, kw_only=True):
    """Parameters of images, in image routes and in chats."""

    size: Annotated[str, Meta(pattern=SIZE_PATTERN, description="auto, or WIDTHxHEIGHT in pixels")] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    negative_prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)] | None = None
    lora: Annotated[str, Meta(max_length=200)] | LoraChoice | None = None
    lora_scale: LoraScale | None = None
    step_cache: bool | None = None


class ImageBody(_ImageOptions, kw_only=True):
    """POST /v1/images/generations"""

    refused_fields: ClassVar[Reasons] = {
        **dict.fromkeys(
            ("complexity", "frame_count", "frame_duration_ms", "svg"), "is for formats not supported here."
        ),
        **dict.fromkeys(
            ("cache_backend", "cache_config", "vae_use_slicing", "vae_use_tiling", "generator_device", "flow_shift"),
            "is set by the server's deploy file, not by clients.",
        ),
    }
    prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)]
    n: Annotated[int, Meta(ge=1, le=MAX_IMAGES)] | None = None
    seed: Annotated[int, Meta(ge=-1, le=MAX_SEED, description="-1: random")] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    preview_every: Annotated[int, Meta(ge=0, le=1000)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    quality: ImageQuality | None = None
    style: Literal["vivid", "natural"] | None = None


class EditBody(ImageBody, kw_only=True):
    """POST /v1/images/edits, beside the files"""

    input_fidelity: Literal["high", "low"] | None = None


# --- chat ---


class InputAudio(Strict, kw_only=True):
    """Audio as base64. `format` is not relied on: the data says what it is."""

    data: Url
    format: InputAudioFormat


class ImageUrl(Strict, kw_only=True):
    ignored_fields: ClassVar[Names] = frozenset(("format",))  # the data says what it is
    url: Url
    detail: Literal["auto", "low", "high", "original"] | None = None


class MediaUrl(Strict, kw_only=True):
    url: Url


class TextPart(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: Text


class RefusalPart(msgspec.Struct, kw_only=True, tag_field="type", tag="refusal"):
    refusal: Text


class InputAudioPart(msgspec.Struct, kw_only=True, tag_field="type", tag="input_audio"):
    input_audio: InputAudio


class ImageUrlPart(msgspec.Struct, kw_only=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | Url


class AudioUrlPart(msgspec.Struct, kw_only=True, tag_field="type", tag="audio_url"):
    audio_url: MediaUrl | Url


class VideoUrlPart(msgspec.Struct, kw_only=True, tag_field="type", tag="video_url"):
    video_url: MediaUrl | Url


ContentPart = TextPart | RefusalPart | InputAudioPart | ImageUrlPart | AudioUrlPart | VideoUrlPart


class CalledFunction(msgspec.Struct, kw_only=True):
    name: Text
    arguments: Text


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that an earlier answer made."""

    id: Text
    type: str = "function"
    function: CalledFunction


class AudioReference(msgspec.Struct, kw_only=True):
    """The audio of an earlier answer, by its id."""

    id: Text


class ChatMessage(Strict, kw_only=True):
    """One turn. Clients replay fields of the answers of OpenAI and of other servers."""

    ignored_fields: ClassVar[Names] = frozenset((
        "images", "refusal", "annotations", "function_call", "weight", "reasoning", "reasoning_content",
        "reasoning_details", "thinking_blocks", "provider_specific_fields", "cache_control", "parsed",
    ))  # fmt: skip
    role: Role
    content: Text | list[ContentPart] | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None
    audio: AudioReference | None = None


class VoiceId(Strict, kw_only=True):
    id: Annotated[str, Meta(min_length=1, max_length=200)]


RecordingName = Annotated[str, Meta(pattern=r"^[^\s/\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]{0,63}$")]
Transcript = Annotated[str, Meta(max_length=1000)]


class VoiceBody(Strict, kw_only=True):
    """POST /v1/audio/voices, beside the file"""

    name: RecordingName
    consent: Annotated[str, Meta(max_length=200)] | None = None
    ref_text: Transcript | None = None
    speaker_description: Transcript | None = None


class ConsentBody(Strict, kw_only=True):
    """POST /v1/audio/voice_consents, beside the file"""

    name: RecordingName
    language: Annotated[str, Meta(min_length=2, max_length=35)]


class ConsentNameBody(Strict, kw_only=True):
    """POST /v1/audio/voice_consents/{consent}"""

    name: RecordingName


VoiceName = Annotated[str, Meta(min_length=1, max_length=200)] | VoiceId


class AudioOptions(Strict, kw_only=True):
    voice: VoiceName
    format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm16"]


class StreamOptions(Strict, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ProcessorOptions(Strict, kw_only=True):
    """vLLM's name for: the audio of a video is read together with its frames."""

    use_audio_in_video: bool | None = None


class TemplateOptions(Strict, kw_only=True):
    """vLLM's name for: options of the chat template. No model here has a thinking mode that could be switched on."""

    enable_thinking: bool | None = None


class ResponseSchema(msgspec.Struct, kw_only=True):
    schema: Json | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: ResponseSchema | None = None


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | UnsetType = UNSET
    parameters: Json | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class Tool(msgspec.Struct, kw_only=True):
    """A function that the model may call; other types are refused."""

    type: str = ""
    function: FunctionTool | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    name: str | None = None


class NamedToolChoice(msgspec.Struct, kw_only=True):
    type: str = ""
    function: FunctionName | None = None


class ChatBody(_ImageOptions, kw_only=True):
    """POST /v1/chat/completions"""

    refused_fields: ClassVar[Reasons] = {
        "functions": "is not supported: send 'tools'.", "function_call": "is not supported: send 'tool_choice'.",
    }  # fmt: skip
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    modalities: Annotated[list[Modality], Meta(min_length=1)] | None = None
    audio: AudioOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: TokenCount | None = None
    max_tokens: TokenCount | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Seed | None = None
    logit_bias: dict[str, Bias] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    ignore_eos: bool | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    chat_template_kwargs: TemplateOptions | None = None


# --- responses ---


class InputText(msgspec.Struct, kw_only=True, tag_field="type", tag="input_text"):
    text: Text


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: Text


class InputImage(Strict, kw_only=True, tag_field="type", tag="input_image"):
    refused_fields: ClassVar[Reasons] = {"file_id": "is not supported: this server keeps no files; send 'image_url'."}
    image_url: Url
    detail: Literal["auto", "low", "high", "original"] | None = None


ItemPart = InputText | OutputText | RefusalPart | InputImage | InputAudioPart
OutputPart = InputText | OutputText | InputImage


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """One turn. `type` may be left out."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ItemPart], Meta(max_length=MAX_MESSAGES)] | None = None


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that an earlier response made."""

    call_id: Text
    name: Text
    arguments: Text


class FunctionOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """What a called function has answered."""

    call_id: Text
    output: Text | Annotated[list[OutputPart], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of another server that a client replays. It is ignored."""


class ReferenceItem(msgspec.Struct, kw_only=True, tag_field="type", tag="item_reference"):
    """An item of the output of a response that is kept."""

    id: Text


InputItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | ReferenceItem


class ResponseTool(FunctionTool, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call; other types are refused."""


class ResponseToolChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    name: str


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=64)] | UnsetType = UNSET
    schema: Json | UnsetType = UNSET
    description: Text | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class TextOptions(Strict, kw_only=True):
    ignored_fields: ClassVar[Names] = frozenset(("verbosity",))
    format: TextFormat | None = None


class ResponsesBody(_JsonBody, kw_only=True):
    """POST /v1/responses"""

    ignored_fields: ClassVar[Names] = _JsonBody.ignored_fields - {"metadata", "store"} | {
        "reasoning",
        "max_tool_calls",
        "access_programs",
        "image",
    }
    refused_fields: ClassVar[Reasons] = {
        "conversation": "is not supported: continue a response by 'previous_response_id'.",
        "prompt": "is not supported: this server keeps no prompts; send 'instructions' and 'input'.",
        "context_management": "is not supported: send less, or start again without 'previous_response_id'.",
        "background_options": "is not supported: responses are made while their client waits.",
    }
    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    previous_response_id: Annotated[str, Meta(max_length=200)] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    seed: Seed | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None

    @classmethod
    def prepare(cls, values: Json) -> None:
        """Clients leave the type of messages and of references out."""
        items = values.get("input")
        for item in cast(list[object], items) if isinstance(items, list) else ():
            if isinstance(item, dict) and item.keys() & {"role", "id"}:
                cast(Json, item).setdefault("type", "message" if "role" in item else "item_reference")


# --- completions ---


class CompletionBody(_JsonBody, kw_only=True):
    """POST /v1/completions. `max_tokens` is 16 if it is not sent, as at OpenAI."""

    refused_fields: ClassVar[Reasons] = {"suffix": "is not supported: texts are continued at their end only."}
    prompt: Prompt | Annotated[list[Prompt | int | list[int]], Meta(min_length=1, max_length=MAX_PROMPTS)]
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Seed | None = None
    logit_bias: dict[str, Bias] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None


class EmbeddingBody(Strict, kw_only=True):
    """POST /v1/embeddings"""

    ignored_fields: ClassVar[Names] = frozenset(("user",))
    model: Text
    input: Text | Annotated[list[Text | int | list[int]], Meta(min_length=1, max_length=MAX_PROMPTS)]
    dimensions: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    encoding_format: Literal["float", "base64"] | None = None


# --- audio ---


class SpeechBody(_JsonBody, kw_only=True):
    """POST /v1/audio/speech. Audio is always sent as it is made, so `stream` changes nothing."""

    ignored_fields: ClassVar[Names] = _JsonBody.ignored_fields | {"stream"}
    input: Annotated[str, Meta(max_length=MAX_INPUT_CHARS)]
    voice: VoiceName | None = None
    ref_audio: Annotated[Url, Meta(description="a URL, a data URL or base64")] | None = None
    ref_text: Transcript | None = None
    x_vector_only_mode: bool | None = None
    response_format: AudioFileFormat | Literal["pcm"] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    instructions: Annotated[str, Meta(max_length=MAX_INPUT_CHARS)] | None = None
    timestamp_granularities: Annotated[list[Literal["word"]], Meta(max_length=1)] | None = None
    word_timestamps: bool | None = None

    @classmethod
    def prepare(cls, values: Json) -> None:
        """Clients send one granularity as a string, as they do in forms."""
        if isinstance(granularity := values.get("timestamp_granularities"), str):
            values["timestamp_granularities"] = [granularity]

    @property
    def with_words(self) -> bool:
        """True if the times of words are asked for, in OpenAI's way of transcriptions or in the other one."""
        return bool(self.timestamp_granularities or self.word_timestamps)

    @property
    def words_param(self) -> str:
        """The parameter that asks for them."""
        return "timestamp_granularities" if self.timestamp_granularities else "word_timestamps"


class SpeechStreamConfig(_Common, kw_only=True):
    """Message `session.config` of /v1/audio/speech/stream"""

    voice: VoiceName
    response_format: AudioFileFormat | Literal["pcm"] | None = None
    instructions: Annotated[str, Meta(max_length=MAX_INPUT_CHARS)] | None = None
    word_timestamps: bool | None = None
    words_param: ClassVar[str] = "word_timestamps"

    @property
    def with_words(self) -> bool:
        """True if the times of words are asked for."""
        return bool(self.word_timestamps)


class StreamedText(Strict, kw_only=True):
    """Message `input.text`"""

    text: Text


class StreamedTextDone(Strict, kw_only=True):
    """Message `input.done`"""


class CaptionedSpeechBody(_JsonBody, kw_only=True):
    """POST /dev/captioned_speech, as clients of Kokoro-FastAPI send it"""

    refused_fields: ClassVar[Reasons] = dict.fromkeys(
        ("lang_code", "volume_multiplier", "normalization_options", "download_format", "return_download_link"),
        "is not supported here.",
    )
    input: Annotated[str, Meta(max_length=MAX_INPUT_CHARS)]
    voice: VoiceName
    response_format: AudioFileFormat | Literal["pcm"] | None = None
    stream: bool | None = None
    return_timestamps: bool | None = None
    words_param: ClassVar[str] = "return_timestamps"

    @property
    def with_words(self) -> bool:
        """True unless the times of words are declined."""
        return self.return_timestamps is not False


class VadOptions(Strict, kw_only=True):
    """How OpenAI cuts long audio into pieces; pipelines here decide that themselves."""

    type: Literal["server_vad"]
    prefix_padding_ms: Annotated[int, Meta(ge=0)] | None = None
    silence_duration_ms: Annotated[int, Meta(ge=0)] | None = None
    threshold: Fraction | None = None


class TranscriptionBody(_Common, kw_only=True):
    """POST /v1/audio/transcriptions, beside the file"""

    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    stream: bool | None = None
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    prompt: Text | None = None
    temperature: Fraction | None = None
    chunking_strategy: Literal["auto"] | VadOptions | None = None
