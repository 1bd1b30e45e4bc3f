# SPDX-License-Identifier: Apache-2.0
"""wss /v1/audio/speech/stream: a text that arrives in parts, spoken while it arrives.

    client: session.config, then input.text as often as it likes, then input.done; it may leave at any time
    server: session.created, audio.start, binary messages of audio with audio.words in front, audio.done, session.done

An error is a message, too, and ends the session. Closing the connection ends the runs: so a listener interrupts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from triton_omni.backends.wire import OmniError
from triton_omni.openai.endpoints.chat_answer import usage_of
from triton_omni.openai.endpoints.schemas import Json, SpeechStreamConfig, StreamedText, StreamedTextDone
from triton_omni.openai.endpoints.speech import SpeechWriter, speech_call, word_dicts, words_of
from triton_omni.openai.http.access import SOCKET_KEY
from triton_omni.openai.http.calls import BackendCall, PieceStream, open_pieces
from triton_omni.openai.http.context import RequestContext, context_of
from triton_omni.openai.http.errors import ApiError, invalid
from triton_omni.openai.http.parsing import Body, load_json, parse_body

log = logging.getLogger("triton_omni.proxy")

MAX_TEXT_CHARS = 65_536
"""All text of a session. It is below what a server lets wait for a stage, so no text is ever refused as too early."""
CONFIG_S = 30.0
"""A client that has connected says within this what it wants."""
POLICY, INTERNAL = 1008, 1011
"""WebSocket close codes: the client's fault, ours."""
CLIENT_ERROR = range(400, 500)


async def stream_speech(socket: WebSocket) -> None:
    """Speak what one client sends."""
    context = context_of(socket)
    offered = [name for name in socket.scope.get("subprotocols", ()) if not name.startswith(SOCKET_KEY)]
    await socket.accept(subprotocol=offered[0] if offered else None)
    error: ApiError | None = None
    try:
        await SpeechSession(socket, context).run()
    except WebSocketDisconnect:
        return
    except ApiError as caught:
        error = caught
    except Exception:  # the border: every session ends with a word
        log.exception("session %s failed", context.request_id, extra={"request_id": context.request_id})
        error = ApiError(500, "Internal error of the proxy.", code="internal_error", kind="server_error")
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it may have left meanwhile
        if error is not None:
            await socket.send_json({"type": "error", **error.body})
        code = 1000 if error is None else POLICY if error.status in CLIENT_ERROR else INTERNAL
        if socket.application_state is WebSocketState.CONNECTED:
            await socket.close(code)


class SpeechSession:
    """One connection. Three tasks: one always reads, so that it sees the client leave; one adds text; one sends."""

    def __init__(self, socket: WebSocket, context: RequestContext) -> None:
        self._socket = socket
        self._context = context
        self._text = ""
        self._chars = 0
        self._has_ended = False
        self._has_news = asyncio.Event()
        self._token: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """The whole session. Raises ApiError or WebSocketDisconnect."""
        try:
            async with asyncio.timeout(CONFIG_S):
                config = await self._config()
        except TimeoutError:
            message = f"No 'session.config' came within {CONFIG_S:g} s."
            raise ApiError(408, message, code="no_config", param="session.config") from None
        call = await speech_call(config, self._context)
        pieces = await open_pieces(self._context, call)
        pipeline = await self._context.services.catalogue.pipeline_of(config.model)
        sending = asyncio.create_task(self._send(pieces, config))
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._append(pipeline, call)), sending]
        try:
            while not sending.done():
                done, _ = await asyncio.wait([t for t in tasks if not t.done()], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _config(self) -> SpeechStreamConfig:
        kind, values = await self._message()
        if kind != "session.config":
            raise invalid("type", f"The first message must be 'session.config', not '{kind[:100]}'.")
        return parse_body(SpeechStreamConfig, values, self._context.ignored)

    async def _receive(self) -> None:
        """Take messages until the client leaves."""
        while True:
            kind, values = await self._message()
            match kind:
                case "input.text":
                    text = self._parsed(StreamedText, values).text
                    self._chars += len(text)
                    if self._chars > MAX_TEXT_CHARS:
                        message = f"A session may have {MAX_TEXT_CHARS} characters of text (got {self._chars})."
                        raise invalid("text", message)
                    if self._has_ended:
                        raise invalid("type", "There was 'input.done' before this 'input.text'.")
                    self._text += text
                case "input.done":
                    self._parsed(StreamedTextDone, values)
                    self._has_ended = True
                case _:
                    known = "'input.text' or 'input.done'"
                    raise invalid("type", f"'type' must be {known} now, not '{kind[:100]}'.")
            self._has_news.set()

    async def _message(self) -> tuple[str, Json]:
        """The next message: its type, and its other fields."""
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code") or 1000)
        if message.get("text") is None:
            raise invalid("type", "Messages are JSON; only the server sends binary ones.")
        values: dict[str, Any] = load_json(message["text"].encode("utf-8", "surrogatepass"))
        return str(values.pop("type", "")), values

    def _parsed(self, kind: type[Body], values: Json) -> Body:
        ignored = None if self._context.ignored is None else list[str]()  # of this message: a session has many
        return parse_body(kind, values, ignored)

    async def _append(self, pipeline: str, call: BackendCall) -> None:
        """Add what has arrived to the request's input; of several parts one."""
        token = await self._token
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            text, self._text, ends = self._text, "", self._has_ended
            try:
                await self._context.services.backend.append(pipeline, token, text, ends=ends)
            except OmniError as error:
                if error.code == "not_found":  # it has just ended, which the answer itself says better
                    return
                raise call.error_of(error) from error
            if ends:
                return

    async def _send(self, pieces: PieceStream, config: SpeechStreamConfig) -> None:
        """Send the audio as it is made."""
        file_format = config.response_format or "pcm"
        writer = SpeechWriter(file_format, with_words=config.with_words, may_be_silent=True)
        has_begun = False
        async for _, piece in pieces:
            if piece.event.token and not self._token.done():
                self._token.set_result(piece.event.token)
                ignored = {"ignored_parameters": self._context.ignored} if self._context.ignored else {}
                await self._socket.send_json({"type": "session.created", "id": self._context.request_id, **ignored})
            if words := words_of(piece):
                await self._socket.send_json({"type": "audio.words", "words": word_dicts(words)})
            if not (data := writer.encoded(piece)) and piece.event.type != "end":
                continue
            if not has_begun:
                rate_hz = writer.sample_rate_hz
                await self._socket.send_json({"type": "audio.start", "format": file_format, "sample_rate": rate_hz})
                has_begun = True
            if data:
                await self._socket.send_bytes(data)
            if piece.event.type == "end":
                done: Json = {"type": "audio.done", "usage": usage_of(piece.event)}
                if config.with_words:
                    done["words"] = None if writer.words is None else word_dicts(writer.words)
                await self._socket.send_json(done)
        await self._socket.send_json({"type": "session.done"})
