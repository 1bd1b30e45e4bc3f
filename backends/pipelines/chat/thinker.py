# SPDX-License-Identifier: Apache-2.0
"""Stage `thinker`: a chat model on the AR engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from triton_omni.backends.ar.completions import COMPLETION, check_completion
from triton_omni.backends.ar.environment import worker_environment
from triton_omni.backends.config.paths import engine_python
from triton_omni.backends.core.engine import Engine, Run
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.generate import GenerateRequest, Message
from triton_omni.backends.core.pipeline import EngineContext

if TYPE_CHECKING:
    from triton_omni.backends.ar.chat_prompts import ChatTokenizer
    from triton_omni.backends.ar.engine import LlmPrompt


def thinker_engine(context: EngineContext) -> Engine:
    """The engine of stage `thinker`, in its worker."""
    from triton_omni.backends.ar.chat_prompts import read_chat_template
    from triton_omni.backends.ar.engine import ArEngine
    from triton_omni.backends.ar.options import checkpoint, read_options

    template = read_chat_template(checkpoint(read_options(context.options, context.stage), context.models_dir))
    return ArEngine(context, partial(ChatPromptBuilder, template=template))


def thinker_environment(context: EngineContext) -> Mapping[str, str]:
    """Variables of the thinker's worker."""
    return worker_environment(context.options, context.device, engine_python().parent.parent)


def check_messages(request: GenerateRequest) -> None:
    """Raise BadRequest, naming the field, for a chat this model cannot read."""
    if not request.messages:
        raise BadRequest("at least one message is needed", "messages")
    if request.tools:
        raise BadRequest("this model does not call tools", "tools")
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        if message.tool_calls or message.role == "tool":
            raise BadRequest("this model does not call tools", where)
        for part in message.parts:
            if part.type not in ("text", "audio"):
                raise BadRequest(f"this model reads text and audio, not {part.type}", where)
            if part.type == "audio" and message.role != "user":
                raise BadRequest(f"audio is allowed in user messages only, not in one of role '{message.role}'", where)


class ChatPromptBuilder:
    """triton_omni.backends.ar.engine.PromptBuilder of text chats; audio parts are read as their transcripts."""

    def __init__(self, tokenizer: ChatTokenizer, template: str) -> None:
        from triton_omni.backends.ar.chat_prompts import ChatEncoder

        self._chats = ChatEncoder(tokenizer, template)

    def check(self, run: Run) -> None:
        (check_completion if run.request.operation == COMPLETION else check_messages)(run.request)

    def build(self, run: Run, transcripts: Sequence[str]) -> LlmPrompt:
        from triton_omni.backends.ar.engine import LlmPrompt

        if run.request.operation == COMPLETION:
            return LlmPrompt(self._chats.encode_plain(run.request.input))
        texts = iter(transcripts)
        chat = [{"role": _role(m), "content": _content(m, texts)} for m in run.request.messages]
        audio_tokens = sum(len(self._chats.encode_text(transcript.strip())) for transcript in transcripts)
        return LlmPrompt(self._chats.encode(chat), audio_tokens=audio_tokens)


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _content(message: Message, transcripts: Iterator[str]) -> str:
    """The parts of a message as one text, a line each; every audio part takes the next transcript."""
    lines: list[str] = []
    for part in message.parts:
        if part.type == "text":
            lines.append(part.text)
            continue
        transcript = next(transcripts, None)
        if transcript is None:
            raise StageFailed("an audio part has no transcript", "transcriber->thinker")
        lines.append(transcript.strip())
    return "\n".join(lines)
