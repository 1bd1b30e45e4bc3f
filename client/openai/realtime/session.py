# SPDX-License-Identifier: Apache-2.0
"""One realtime session: what its client's events change, and the calls that they start. No sockets."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from triton_omni.backends import wire
from triton_omni.backends.wire import GenerateRequest, Message, TranscriptionParams
from triton_omni.media import Media
from triton_omni.openai.endpoints import schemas
from triton_omni.openai.endpoints.chat_request import ChatCall, read_chat
from triton_omni.openai.endpoints.messages import media_errors
from triton_omni.openai.endpoints.schemas import Json
from triton_omni.openai.endpoints.transcriptions import Transcript
from triton_omni.openai.endpoints.voices import check_is_no_upload
from triton_omni.openai.http.calls import BackendCall, open_pieces
from triton_omni.openai.http.context import RequestContext
from triton_omni.openai.http.errors import ApiError, invalid
from triton_omni.openai.http.parsing import load_json, parse_body
from triton_omni.openai.realtime import events
from triton_omni.openai.realtime.answer import RealtimeAnswer
from triton_omni.openai.realtime.conversation import (
    SAMPLE_BYTES,
    Item,
    RealtimeConversation,
    made_item,
    messages_of,
    refused,
    samples_of,
    spoken_item,
    wav,
)

log = logging.getLogger("triton_omni.proxy")

INTERNAL = ApiError(500, "Internal error of the proxy.", code="internal_error", kind="server_error")
Send = Callable[[Json], Awaitable[None]]
MAX_TURN_S = 600
"""Longest turn, and the most audio that waits to be committed."""
MIN_TURN_S = 0.1
"""OpenAI's shortest."""
MAX_SIDE_RESPONSES = 8
"""Responses outside of the conversation that run at a time."""
PCM = {"type": "audio/pcm", "rate": events.PCM_HZ}


class Session:
    """State of one connection. `send` gets every server event, in order."""

    def __init__(self, context: RequestContext, config: Json, operations: Sequence[str], send: Send) -> None:
        self._context = context
        self._model: str = config["model"]
        self._send_out = send
        self._lock = asyncio.Lock()
        self._events = 0
        self._conversation = RealtimeConversation()
        self._conversation_id = new_id("conv")
        self._pcm = bytearray()
        self._hears_words = "transcription" in operations
        self._config = config
        self._has_spoken = False
        self._turns = asyncio.Lock()
        """One turn after the other is transcribed."""
        self._transcribing: dict[str, asyncio.Task[None]] = {}
        self._responses: dict[str, asyncio.Task[None]] = {}
        self._main: str | None = None
        """Id of the conversation's response that is being made."""
        self._cancelled: set[str] = set()

    async def start(self) -> None:
        """Greet the client."""
        await self._send("session.created", session=self._config)

    async def close(self) -> None:
        """End all that runs."""
        tasks = [*self._transcribing.values(), *self._responses.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def on(self, data: bytes) -> None:
        """One event of the client. What is wrong with it becomes an `error`; the session goes on."""
        event_id: str | None = None
        try:
            values: dict[str, Any] = load_json(data)
            given = values.get("event_id")
            event_id = given[:512] if isinstance(given, str) else None
            kind = str(values.pop("type", ""))
            if kind not in events.CLIENT_EVENTS:
                known = ", ".join(f"'{name}'" for name in events.CLIENT_EVENTS)
                raise invalid("type", f"'type' must be one of {known}, not '{kind[:100]}'.")
            change: Json = values.get("session") or {}
            ignored = None if self._context.ignored is None else list[str]()  # of this event: a session has many
            event = parse_body(events.CLIENT_EVENTS[kind], values, ignored)
            if isinstance(event, events.UpdateSession):
                await self._update(event.session, change)
            else:
                await self._on(event)
        except ApiError as error:
            await self._send("error", error=refused(error, event_id))

    async def _on(self, event: events.ClientEvent) -> None:
        match event:
            case events.AppendAudio():
                self._append(event)
            case events.CommitAudio():
                await self._commit()
            case events.ClearAudio():
                self._drop_audio()
                await self._send("input_audio_buffer.cleared")
            case events.CreateItem():
                await self._create(event)
            case events.RetrieveItem():
                item = self._conversation.find(event.item_id)
                await self._send("conversation.item.retrieved", item=item.with_audio())
            case events.DeleteItem():
                self._context.share.give(self._conversation.delete(event.item_id).nbytes)
                await self._send("conversation.item.deleted", item_id=event.item_id)
            case events.TruncateItem():
                self._conversation.find(event.item_id).truncate(event.content_index, event.audio_end_ms)
                place = {"content_index": event.content_index, "audio_end_ms": event.audio_end_ms}
                await self._send("conversation.item.truncated", item_id=event.item_id, **place)
            case events.CreateResponse():
                await self._respond(event.response or events.ResponseConfig())
            case events.CancelResponse():
                self._cancel(event.response_id)
            case _:
                raise AssertionError(event)

    # --- configuration -----------------------------------------------------------------------------------------------
    async def _update(self, given: events.SessionConfig, change: Json) -> None:
        if given.model not in (None, self._model):
            raise invalid("session.model", f"The session's model is '{self._model}' and stays so.")
        config = events.merged(self._config, change)
        voice = config["audio"]["output"]["voice"]
        if self._has_spoken and voice != self._config["audio"]["output"]["voice"]:
            message = "The voice cannot change after the session's first audio."
            raise invalid("session.audio.output.voice", message, "cannot_update_voice")
        self._config = config
        await self._send("session.updated", session=config)

    # --- audio of the client -----------------------------------------------------------------------------------------
    def _append(self, event: events.AppendAudio) -> None:
        pcm = samples_of(event.audio, "audio")
        if len(self._pcm) + len(pcm) > MAX_TURN_S * events.PCM_HZ * SAMPLE_BYTES:
            raise invalid("audio", f"The buffer may have {MAX_TURN_S} s of audio: commit or clear it.")
        self._context.share.take(len(pcm))
        self._pcm += pcm

    def _drop_audio(self) -> None:
        self._context.share.give(len(self._pcm))
        self._pcm.clear()

    async def _commit(self) -> None:
        length_s = len(self._pcm) / (events.PCM_HZ * SAMPLE_BYTES)
        if length_s < MIN_TURN_S:
            message = (
                f"Error committing input audio buffer: it has {1e3 * length_s:.2f} ms, at least 100 ms are needed."
            )
            raise invalid("input_audio_buffer", message, "input_audio_buffer_commit_empty")
        item = spoken_item(new_id("item"), bytes(self._pcm))
        before = self._insert(item, None)
        self._drop_audio()
        await self._send("input_audio_buffer.committed", item_id=item.id, previous_item_id=before)
        await self._show(item, before)

    async def _show(self, item: Item, before: str | None) -> None:
        """Tell of an item that is complete, and begin to transcribe it."""
        for kind in ("added", "done"):
            await self._send(f"conversation.item.{kind}", item=dict(item.json), previous_item_id=before)
        wanted = self._config["audio"]["input"]["transcription"]
        is_speech = [part["type"] for part in item.json.get("content", ())] == ["input_audio"]
        if is_speech and item.pcm and (wanted is not None or self._hears_words):
            self._run(self._transcribing, item.id, self._transcribe(item, wanted))

    async def _transcribe(self, item: Item, wanted: Json | None) -> None:
        """Set the words of an item, and tell them if the session wants them."""
        kind = "conversation.item.input_audio_transcription"
        language = (wanted or {}).get("language")
        try:
            async with self._turns:
                transcript = await self._words(item.pcm[0], language)
        except ApiError as error:
            if wanted is not None:
                fields = refused(error, None)
                del fields["event_id"]
                await self._send(f"{kind}.failed", item_id=item.id, content_index=0, error=fields)
            return  # a model that reads audio itself may still understand it; others say what is wrong
        item.transcribe(transcript.text.strip())
        if wanted is not None:
            fields = {"transcript": item.json["content"][0]["transcript"], "usage": transcript.usage}
            await self._send(f"{kind}.completed", item_id=item.id, content_index=0, **fields)

    async def _words(self, pcm: bytes, language: str | None) -> Transcript:
        transcript = Transcript()
        async with self._call() as context:
            media = Media(context.share.take)
            with media_errors("audio", "invalid_audio"):
                part = await context.services.pools.decode(media.audio, wav(pcm))
            request = GenerateRequest(
                operation="transcription", messages=(Message("user", (part,)),),
                transcription=TranscriptionParams(language, word_timestamps=False),
            )  # fmt: skip
            async for _, piece in await open_pieces(context, BackendCall(self._model, request, {}, media.tensors)):
                transcript.on(piece)
        return transcript

    # --- items and responses -----------------------------------------------------------------------------------------
    async def _create(self, event: events.CreateItem) -> None:
        place = self._conversation.place_after(event.previous_item_id)
        item = made_item(event.item, new_id)
        await self._show(item, self._insert(item, place))

    def _insert(self, item: Item, place: int | None) -> str | None:
        """Add a client's item, charged to the proxy's budget; returns the id of the one before it. Raises ApiError."""
        self._context.share.take(item.nbytes)
        try:
            return self._conversation.insert(item, place)
        except ApiError:
            self._context.share.give(item.nbytes)
            raise

    async def _respond(self, given: events.ResponseConfig) -> None:
        is_aside = given.conversation == "none"
        if not is_aside and self._main is not None:
            message = f"Conversation already has an active response in progress: {self._main}."
            raise invalid("response", message, "conversation_already_has_active_response")
        if len(self._responses) > MAX_SIDE_RESPONSES:
            raise invalid("response", f"At most {MAX_SIDE_RESPONSES} responses run outside of the conversation.")
        key = self._context.key
        if key is not None:
            key.spend_request()
        items = self._input(given)
        response_id = new_id("resp")
        if not is_aside:
            self._main = response_id
        self._run(self._responses, response_id, self._answer(response_id, given, items, is_aside))

    def _input(self, given: events.ResponseConfig) -> Sequence[Item]:
        """The items that a response reads. Raises ApiError."""
        if given.input is None:
            return list(self._conversation.items)
        find = self._conversation.find
        return [
            find(item.id) if isinstance(item, events.ItemByReference) else made_item(item, new_id)
            for item in given.input
        ]

    def _cancel(self, response_id: str | None) -> None:
        response_id = response_id or self._main
        if response_id is None or response_id not in self._responses:
            message = "Cancellation failed: no active response found."
            raise invalid("response_id", message, "response_cancel_not_active")
        self._cancelled.add(response_id)
        self._responses[response_id].cancel()

    async def _answer(
        self, response_id: str, given: events.ResponseConfig, items: Sequence[Item], is_aside: bool
    ) -> None:
        config = events.merged(self._config, events.plain(given))
        response: Json = {
            "object": "realtime.response", "id": response_id, "status": "in_progress", "status_details": None,
            "output": [], "conversation_id": None if is_aside else self._conversation_id, "usage": None,
            "output_modalities": config["output_modalities"], "metadata": given.metadata,
            "max_output_tokens": config["max_output_tokens"], "audio": {"output": config["audio"]["output"]},
        }  # fmt: skip
        add = None if is_aside else self._added
        answer = RealtimeAnswer(response, new_id, add, one_call=config["parallel_tool_calls"] is False)
        try:
            await self._send_all(answer.start())
            await asyncio.gather(*(task for item in items if (task := self._transcribing.get(item.id)) is not None))
            async with self._call() as context:
                call = await self._chat(context, config, items)
                async for _, piece in await open_pieces(context, call.call):
                    self._has_spoken |= piece.audio is not None
                    await self._send_all(answer.on(piece))
                    if piece.event.type == "end":
                        await self._end(response_id, answer.end(piece.event))
        except ApiError as error:
            await self._end(response_id, answer.failed(error))
        except asyncio.CancelledError:
            if response_id not in self._cancelled:
                raise  # the client has left
            self._cancelled.discard(response_id)
            await self._end(response_id, answer.cancelled("client_cancelled"))
        except Exception:  # the border: every response ends
            log.exception("response %s failed", response_id, extra={"request_id": self._context.request_id})
            await self._end(response_id, answer.failed(INTERNAL))

    async def _end(self, response_id: str, last: Iterable[Json]) -> None:
        """Send the last events. From the one that says so on, the next response may begin."""
        rest = list(last)
        if self._main == response_id:
            self._main = None
        await self._send_all(rest)

    def _added(self, item: Item) -> Iterable[Json]:
        before = self._conversation.insert(item)
        yield {"type": "conversation.item.added", "item": dict(item.json), "previous_item_id": before}

    async def _chat(self, context: RequestContext, config: Json, items: Sequence[Item]) -> ChatCall:
        """The same call as that of /v1/chat/completions with these messages. Raises ApiError."""
        messages, params = messages_of(config["instructions"], items)
        output = config["audio"]["output"]
        speaks = "audio" in config["output_modalities"]
        limit = config["max_output_tokens"]
        body = schemas.ChatBody(
            model=self._model, messages=messages, modalities=["text", "audio"] if speaks else ["text"], stream=True,
            audio=schemas.AudioOptions(voice=output["voice"], format="pcm16") if speaks else None,
            speed=output["speed"] if speaks else None, max_completion_tokens=None if limit == "inf" else limit,
            temperature=config["temperature"], seed=config["seed"],
            tools=[_tool(tool) for tool in config["tools"]] or None, tool_choice=_tool_choice(config),
        )  # fmt: skip
        if body.audio is not None:
            await check_is_no_upload(context, body.audio.voice, self._model, "audio.output.voice")
        return await read_chat(body, context, params)

    # ---
    @asynccontextmanager
    async def _call(self) -> AsyncGenerator[RequestContext]:
        """A context of its own for one call; leaving it ends the call."""
        async with AsyncExitStack() as stack:
            share = stack.enter_context(self._context.services.budget.share())
            request_id = wire.new_request_id()
            yield replace(self._context, stack=stack, share=share, request_id=request_id, body_bytes=0)

    def _run(self, tasks: dict[str, asyncio.Task[None]], key: str, work: Any) -> None:
        task = tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda _: tasks.pop(key, None))

    async def _send_all(self, sent: Iterable[Json]) -> None:
        for event in sent:
            await self._send(**event)

    async def _send(self, type: str, **fields: object) -> None:
        async with self._lock:
            self._events += 1
            await self._send_out({"type": type, "event_id": f"event_{self._events}", **fields})


def new_id(kind: str) -> str:
    """An id such as item_… that no other session has."""
    return f"{kind}_{secrets.token_hex(12)}"


def defaults(model: str, about: Json) -> Json:
    """The configuration of a session of which its client has said nothing yet."""
    voices = about.get("voices") or ()
    return {
        "type": "realtime", "object": "realtime.session", "id": new_id("sess"), "model": model,
        "expires_at": int(time.time()) + 3600, "output_modalities": ["audio"] if voices else ["text"],
        "instructions": "", "tools": [], "tool_choice": "auto", "parallel_tool_calls": None,
        "max_output_tokens": "inf", "temperature": None, "seed": None,
        "audio": {
            "input": {"format": PCM, "transcription": None, "noise_reduction": None, "turn_detection": None},
            "output": {"format": PCM, "voice": voices[0] if voices else None, "speed": 1.0},
        },
    }  # fmt: skip


def _tool(tool: Json) -> schemas.Tool:
    values = {name: value for name, value in tool.items() if name != "type"}
    return schemas.Tool(type="function", function=schemas.FunctionTool(**values))


def _tool_choice(config: Json) -> str | schemas.NamedToolChoice | None:
    choice = config["tool_choice"]
    if not config["tools"]:
        return None
    if isinstance(choice, str):
        return choice
    return schemas.NamedToolChoice(type="function", function=schemas.FunctionName(name=choice["name"]))
