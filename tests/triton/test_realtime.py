# SPDX-License-Identifier: Apache-2.0
"""A spoken question over /v1/realtime with the SDK's client, the real proxy, and a real server with real weights."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.kit.server_calls import wait_until_idle
from tests.kit.triton_server import RunningServer

pytestmark = [pytest.mark.triton, pytest.mark.timeout(180)]

QUESTION = "What is the capital of France?"
STEP = 960  # bytes: 20 ms, as a microphone sends them


@pytest.fixture(scope="module")
def sdk(chat_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=chat_server.openai, api_key="any", max_retries=0, timeout=90) as client:
        yield client
    wait_until_idle(chat_server, "chat")


def until(connection: Any, kind: str) -> list[Any]:
    got = [connection.recv()]
    while got[-1].type != kind:
        assert got[-1].type != "error", got[-1]
        got.append(connection.recv())
    return got


def sampling() -> dict[str, Any]:
    return {"temperature": 0.7, "seed": 5}


def test_a_spoken_question_is_transcribed_and_answered_as_by_the_chat_route(sdk: openai.OpenAI) -> None:
    voice = sdk.models.retrieve("chat").model_extra["voices"][0]  # type: ignore[index]
    asked = sdk.audio.speech.create(model="chat", voice=voice, input=QUESTION, response_format="pcm").read()
    with sdk.realtime.connect(model="chat") as connection:
        assert connection.recv().type == "session.created"
        session: Any = {
            "type": "realtime", "instructions": "Answer in one sentence.", "max_output_tokens": 12, **sampling(),
            "audio": {"input": {"transcription": {"model": "whisper-1"}}, "output": {"voice": voice}},
        }  # fmt: skip
        connection.session.update(session=session)
        until(connection, "session.updated")
        for start in range(0, len(asked), STEP):
            connection.input_audio_buffer.append(audio=base64.b64encode(asked[start : start + STEP]).decode())
        connection.input_audio_buffer.commit()
        transcript = until(connection, "conversation.item.input_audio_transcription.completed")[-1].transcript
        assert "capital of france" in transcript.lower()
        connection.response.create()
        got = until(connection, "response.done")
    said = "".join(event.delta for event in got if event.type == "response.output_audio_transcript.delta")
    audio = b"".join(base64.b64decode(event.delta) for event in got if event.type == "response.output_audio.delta")
    assert got[-1].response.usage.output_tokens > 0 and len(audio) > 24_000
    messages: Any = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": [{"type": "text", "text": transcript}]},
    ]
    spoken: Any = {"modalities": ["text", "audio"], "audio": {"voice": voice, "format": "pcm16"}}
    answer = sdk.chat.completions.create(
        model="chat", messages=messages, max_completion_tokens=12, **sampling(), **spoken
    ).choices[0].message.audio  # fmt: skip
    assert answer is not None and answer.transcript == said
    assert base64.b64decode(answer.data) == audio


def test_a_client_that_leaves_ends_its_answer(sdk: openai.OpenAI, chat_server: RunningServer) -> None:
    with sdk.realtime.connect(model="chat") as connection:
        content: Any = [{"type": "input_text", "text": "Tell me a very long story."}]
        connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        connection.response.create(response={"max_output_tokens": 400})
        until(connection, "response.output_audio.delta")
    wait_until_idle(chat_server, "chat", timeout_s=10)
