# SPDX-License-Identifier: Apache-2.0
"""`triton-omni demo`: one spoken answer and one image through the OpenAI SDK."""

from __future__ import annotations

import base64
import sys
import time
import wave
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from triton_omni.backends.supervisor.errors import Report, SetupError
from triton_omni.backends.supervisor.serve.temporary import temporary_server

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam
    from openai.types.chat.chat_completion_chunk import ChoiceDelta

T = TypeVar("T")
OUT = Path("out")
QUESTION = "What is the capital of France?"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": QUESTION},
]
SPEECH_HZ = 24000  # OpenAI's pcm16 is always 24 kHz mono
READY_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 300.0
SPEECH_MODEL, IMAGE_MODEL = "chat", "image"


def demo(report: Report) -> int:
    """Run the demo and write its answers into out/; returns the exit code."""
    OUT.mkdir(exist_ok=True)
    with temporary_server([], sys.stdout.fileno(), READY_TIMEOUT_S) as facts:
        from openai import OpenAI, OpenAIError

        base_url = f"http://{facts['host']}:{facts['openai_port']}/v1"
        client = OpenAI(base_url=base_url, api_key="not-needed", timeout=ANSWER_TIMEOUT_S, max_retries=2)
        try:
            files = [*speak(client, report), draw(client, report)]
        except OpenAIError as error:
            raise SetupError(f"the server refused: {error}", hint=f"read {facts['server_log']}") from None
        report("\nstopping the server")
    report("\nfiles:")
    for path in files:
        report(f"  {path}  ({path.stat().st_size} bytes)")
    report(
        f"open {files[1]} to hear the answer. Next: make serve, then point any OpenAI SDK at http://127.0.0.1:9000/v1"
    )
    return 0


def speak(client: OpenAI, report: Report) -> list[Path]:
    """Ask for text and speech in one stream; writes answer.txt and answer.wav."""
    report(f"\nasking: {QUESTION}")
    start = time.monotonic()
    text: list[str] = []
    audio: list[bytes] = []
    stream = client.chat.completions.create(
        model=SPEECH_MODEL,
        messages=MESSAGES,
        modalities=["text", "audio"],
        audio={"voice": model_fact(client, SPEECH_MODEL, "voices", ["default"])[0], "format": "pcm16"},
        max_tokens=120,
        stream=True,
    )
    for chunk in stream:
        delta = chunk.choices[0].delta if chunk.choices else None
        if delta is None:
            continue
        piece = delta.content or _audio_part(delta, "transcript")
        if piece:
            if not text:
                report(f"  first text after {time.monotonic() - start:.2f} s")
            text.append(piece)
        if data := _audio_part(delta, "data"):
            if not audio:
                report(f"  first audio after {time.monotonic() - start:.2f} s")
            audio.append(base64.b64decode(data))
    if not text or not audio:
        raise SetupError(
            f"the answer has {len(text)} pieces of text and {len(audio)} of audio", hint="read the log named above"
        )
    paths = [OUT / "answer.txt", OUT / "answer.wav"]
    paths[0].write_text("".join(text) + "\n")
    write_wav(paths[1], b"".join(audio))
    report(f"  answer: {''.join(text)}")
    report(f"  all after {time.monotonic() - start:.2f} s; {sum(map(len, audio)) / 2 / SPEECH_HZ:.1f} s of speech")
    return paths


def _audio_part(delta: ChoiceDelta, name: str) -> str:
    """A part of `delta.audio`: a field of its own in newer SDKs, an extra in older ones."""
    audio = delta.model_dump().get("audio") or {}
    return audio.get(name) or ""


def model_fact(client: OpenAI, model: str, name: str, default: T) -> T:
    """A field of the model list beyond OpenAI's own."""
    return (client.models.retrieve(model).model_extra or {}).get(name) or default


def write_wav(path: Path, pcm: bytes) -> None:
    """Write 16-bit mono speech as a WAV file."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SPEECH_HZ)
        file.writeframes(pcm)


def draw(client: OpenAI, report: Report) -> Path:
    """Ask for the example image of the model; writes image.png."""
    prompt = model_fact(client, IMAGE_MODEL, "example", "an image")
    report(f"\ndrawing: {prompt}")
    start = time.monotonic()
    answer = client.images.generate(model=IMAGE_MODEL, prompt=prompt, response_format="b64_json", n=1)
    image = answer.data[0].b64_json if answer.data else None
    if not image:
        raise SetupError("the answer has no image", hint="read the log named above")
    path = OUT / "image.png"
    path.write_bytes(base64.b64decode(image))
    report(f"  done after {time.monotonic() - start:.2f} s")
    return path
