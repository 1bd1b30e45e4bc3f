# SPDX-License-Identifier: Apache-2.0
"""The body of /v1/responses → a chat: its items as messages, the rest by other names. All else is the chat route's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
from msgspec import UNSET

from triton_omni.openai.endpoints import schemas
from triton_omni.openai.endpoints.chat_request import ChatCall, read_chat
from triton_omni.openai.endpoints.schemas import (
    CalledFunction,
    ChatBody,
    ChatMessage,
    ContentPart,
    ImageUrlPart,
    InputItem,
    Json,
    ResponsesBody,
    TextPart,
    ToolCall,
)
from triton_omni.openai.http.context import RequestContext
from triton_omni.openai.http.errors import ApiError, invalid, missing, unsupported
from triton_omni.openai.http.stored_responses import StoredResponse

LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url")
"""The last two ask for what is never there."""
RENAMED = {"tool_choice.function.name": "tool_choice.name", "max_completion_tokens": "max_output_tokens"}
PARAMS = {
    "sampling.max_tokens": "max_output_tokens", "sampling.json_schema": "text.format.schema", "messages": "input",
    "modalities": "model", "sampling.logprobs": "top_logprobs",
}  # fmt: skip
_items = msgspec.json.Decoder(list[InputItem])


@dataclass
class Conversation:
    """Messages, and beside each the parameter that it comes from."""

    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    params: list[str] = field(default_factory=list[str])
    call_params: dict[str, str] = field(default_factory=dict[str, str])
    """The server's name of a function call → its parameter."""

    def add(self, item: InputItem, param: str) -> None:
        """Append an item. Calls join the assistant's message before them, as the answer had them."""
        match item:
            case schemas.MessageItem():
                content = item.content
                parts = [_part(part) for part in content] if isinstance(content, list) else content
                self._append(ChatMessage(role=item.role, content=parts), param)
            case schemas.FunctionCallItem():
                call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
                if not self.messages or self.messages[-1].role != "assistant":
                    self._append(ChatMessage(role="assistant", tool_calls=[]), param)
                calls = self.messages[-1].tool_calls = self.messages[-1].tool_calls or []
                self.call_params[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"] = param
                calls.append(call)
            case schemas.FunctionOutputItem():
                content = item.output if isinstance(item.output, str) else [_part(part) for part in item.output]
                self._append(ChatMessage(role="tool", content=content, tool_call_id=item.call_id), param)
            case _:
                pass  # another server's reasoning; references have been resolved

    def _append(self, message: ChatMessage, param: str) -> None:
        self.messages.append(message)
        self.params.append(param)


def _part(part: schemas.ItemPart | schemas.OutputPart) -> ContentPart:
    match part:
        case schemas.InputText() | schemas.OutputText():
            return TextPart(text=part.text)
        case schemas.InputImage():
            return ImageUrlPart(image_url=part.image_url)
        case schemas.RefusalPart() | schemas.InputAudioPart():
            return part


def input_items(body: ResponsesBody) -> list[InputItem]:
    """The request's own items."""
    given = body.input
    return [schemas.MessageItem(role="user", content=given)] if isinstance(given, str) else given


async def read_response(body: ResponsesBody, context: RequestContext) -> ChatCall:
    """The call of the chat that the body stands for. Raises ApiError naming the parameter."""
    _check(body)
    conversation = _conversation(body, context)
    chat = ChatBody(
        model=body.model, messages=conversation.messages, modalities=["text"], stream=body.stream,
        stream_options=body.stream_options, max_completion_tokens=body.max_output_tokens, temperature=body.temperature,
        top_p=body.top_p, seed=body.seed, response_format=_format(body), parallel_tool_calls=body.parallel_tool_calls,
        tools=[_tool(tool) for tool in body.tools or ()] or None, tool_choice=_tool_choice(body), speed=body.speed,
        language=body.language, priority=body.priority, deadlines=body.deadlines, stages=body.stages,
    )  # fmt: skip
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs or 0
    try:
        call = await read_chat(chat, context, conversation.params)
    except ApiError as error:
        error.param = RENAMED.get(error.param or "", error.param)
        raise
    places = {f"messages[{i}]": param for i, param in enumerate(conversation.params)}
    params = {**call.call.params, **PARAMS, **places, **conversation.call_params}
    return replace(call, call=replace(call.call, params=params))


def _check(body: ResponsesBody) -> None:
    """Raise ApiError for what no field alone shows."""
    if body.background:
        raise unsupported("background", "'background' is not supported: responses are made while their client waits.")
    if body.truncation == "auto":
        raise unsupported("truncation", "'truncation' may only be 'disabled': nothing of the input is left out.")
    for i, name in enumerate(body.include or ()):
        if name not in INCLUDES:
            supported = ", ".join(repr(include) for include in INCLUDES)
            raise unsupported(
                f"include[{i}]", f"'include' does not support {name[:100]!r}; supported are: {supported}."
            )


def _conversation(body: ResponsesBody, context: RequestContext) -> Conversation:
    """Instructions, what is continued, and the input."""
    found = Conversation()
    if body.instructions:
        found.add(schemas.MessageItem(role="system", content=body.instructions), "instructions")
    for item in history(context, body.previous_response_id or ""):
        found.add(item, "previous_response_id")
    is_text = isinstance(body.input, str)
    for i, item in enumerate(input_items(body)):
        param = "input" if is_text else f"input[{i}]"
        found.add(_resolved(item, context, f"{param}.id") if isinstance(item, schemas.ReferenceItem) else item, param)
    if not found.messages:
        raise invalid("input", "'input' has nothing that the model could read.")
    if len(found.messages) > schemas.MAX_MESSAGES:
        raise invalid("input", f"A chat may have {schemas.MAX_MESSAGES} messages (got {len(found.messages)}).")
    return found


def history(context: RequestContext, response_id: str) -> list[InputItem]:
    """All items before a request, of the response that it continues and of those before. Raises ApiError 404."""
    store = context.services.responses
    try:
        stored = store.history(owner_of(context), response_id)
    except ApiError as error:
        error.param, error.code = "previous_response_id", "previous_response_not_found"
        raise
    context.share.take(sum(response.nbytes for response in stored))
    return [item for response in stored for item in (*_items.decode(response.items), *_outputs(response))]


def _outputs(response: StoredResponse) -> list[InputItem]:
    return msgspec.convert(msgspec.json.decode(response.body)["output"], list[InputItem])


def _resolved(item: schemas.ReferenceItem, context: RequestContext, param: str) -> InputItem:
    """The item that a reference stands for. Raises ApiError 404."""
    found = context.services.responses.response_of_item(owner_of(context), item.id)
    outputs: Sequence[InputItem] = () if found is None else _outputs(found[0])
    if found is None or found[1] >= len(outputs):
        message = (
            f"There is no item '{item.id[:100]}' here: its response was not stored, or is gone. Send the item itself."
        )
        raise ApiError(404, message, code="item_not_found", param=param)
    return outputs[found[1]]


def owner_of(context: RequestContext) -> str:
    """Whose responses a request may read."""
    assert context.key is not None, "routes below /v1 have a key"
    return context.key.key.sha256


def _format(body: ResponsesBody) -> schemas.ResponseFormat | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return None
    for name in ("name", "schema") if wanted.type == "json_schema" else ():
        if getattr(wanted, name) is UNSET:
            raise missing(f"text.format.{name}")
    schema = wanted.schema if isinstance(wanted.schema, dict) else None
    return schemas.ResponseFormat(type=wanted.type, json_schema=schemas.ResponseSchema(schema=schema))


def _tool(tool: schemas.ResponseTool) -> schemas.Tool:
    values: Json = msgspec.structs.asdict(tool)
    return schemas.Tool(type="function", function=schemas.FunctionTool(**values))


def _tool_choice(body: ResponsesBody) -> str | schemas.NamedToolChoice | None:
    choice = body.tool_choice
    if isinstance(choice, schemas.ResponseToolChoice):
        return schemas.NamedToolChoice(type="function", function=schemas.FunctionName(name=choice.name))
    return choice
