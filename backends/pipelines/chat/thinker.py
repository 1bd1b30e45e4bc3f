# SPDX-License-Identifier: Apache-2.0
"""Stage `thinker`: a chat model on the AR engine; audio parts are read as their transcripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from triton_omni.backends.ar.environment import worker_environment
from triton_omni.backends.config.paths import engine_python
from triton_omni.backends.core.engine import Engine, Run
from triton_omni.backends.core.errors import BadRequest, StageFailed
from triton_omni.backends.core.generate import GenerateRequest, Message
from triton_omni.backends.core.pipeline import EngineContext

if TYPE_CHECKING:
    from triton_omni.backends.ar.engine import Prompt


def thinker_engine(context: EngineContext) -> Engine:
    """The engine of stage `thinker`, in its worker."""
    from triton_omni.backends.ar.engine import ArEngine

    return ArEngine(context, ChatPrompts)


def thinker_environment(context: EngineContext) -> Mapping[str, str]:
    """Variables of the thinker's worker."""
    return worker_environment(context.options, context.device, engine_python().parent.parent)


def check_messages(request: GenerateRequest) -> None:
    """Raise BadRequest, naming the field, for a chat this model cannot read."""
    if not request.messages:
        raise BadRequest("at least one message is needed", "messages")
    if request.tools:
        raise BadRequest("this model does not call tools", "tools")
    for place, message in enumerate(request.messages):
        where = f"messages[{place}]"
        if message.tool_calls or message.role == "tool":
            raise BadRequest("this model does not call tools", where)
        for part in message.parts:
            if part.type not in ("text", "audio"):
                raise BadRequest(f"this model reads text and audio, not {part.type}", where)
            if part.type == "audio" and message.role != "user":
                raise BadRequest(f"audio belongs in a user's message, not in one of role '{message.role}'", where)


class ChatPrompts:
    """Chats to token ids, by the chat template of the checkpoint's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def check(self, run: Run) -> None:
        check_messages(run.request)

    def build(self, run: Run, transcripts: Sequence[str]) -> Prompt:
        from triton_omni.backends.ar.engine import Prompt

        texts = iter(transcripts)
        chat = [{"role": _role(m), "content": _content(m, texts)} for m in run.request.messages]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        heard = sum(len(self._ids(transcript.strip())) for transcript in transcripts)
        return Prompt(self._ids(text), audio_tokens=heard)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)  # the template has written them


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _content(message: Message, transcripts: Iterator[str]) -> str:
    """The parts of a message as one text, a line each; every audio part takes the next transcript."""
    lines: list[str] = []
    for part in message.parts:
        if part.type == "text":
            lines.append(part.text)
            continue
        heard = next(transcripts, None)
        if heard is None:
            raise StageFailed("an audio part came without its transcript", "thinker")
        lines.append(heard.strip())
    return "\n".join(lines)
