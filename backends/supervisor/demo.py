# SPDX-License-Identifier: Apache-2.0
"""`python -m triton_omni.backends.supervisor demo`: one spoken answer (and a picture) through the OpenAI SDK."""

from __future__ import annotations

import base64
import sys
import time
import wave
from pathlib import Path
from typing import Any

from triton_omni.backends.supervisor.errors import Problem, Say
from triton_omni.backends.supervisor.serve.served import served

OUT = Path("out")
QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": QUESTION}]
SPEECH_HZ = 24000  # OpenAI's pcm16 is always 24 kHz mono
READY_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 300.0
SPEAKING, PAINTING = "chat", "image"


def demo(say: Say) -> int:
    """Run the demonstration, its answers into out/; returns the exit code."""
    OUT.mkdir(exist_ok=True)
    with served([], sys.stdout.fileno(), READY_TIMEOUT_S) as facts:
        from openai import OpenAI

        base_url = f"http://{facts['host']}:{facts['openai_port']}/v1"
        client = OpenAI(base_url=base_url, api_key="not-needed", timeout=ANSWER_TIMEOUT_S, max_retries=2)
        made = [*speak(client, say), paint(client, say)]
        say("\nending the server")
    say("\nmade:")
    for path in made:
        say(f"  {path}  ({path.stat().st_size} bytes)")
    say(f"open {made[1]} to hear the answer. Next: make serve, then point any OpenAI SDK at http://127.0.0.1:9000/v1")
    return 0


def speak(client: Any, say: Say) -> list[Path]:
    """Ask for text and speech in one stream; writes answer.txt and answer.wav."""
    say(f"\nasking: {QUESTION}")
    start = time.monotonic()
    text: list[str] = []
    audio: list[bytes] = []
    stream = client.chat.completions.create(
        model=SPEAKING,
        messages=MESSAGES,
        modalities=["text", "audio"],
        audio={"voice": fact_of(client, SPEAKING, "voices", ["default"])[0], "format": "pcm16"},
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
                say(f"  first text after {time.monotonic() - start:.2f} s")
            text.append(piece)
        if data := _audio_part(delta, "data"):
            if not audio:
                say(f"  first audio after {time.monotonic() - start:.2f} s")
            audio.append(base64.b64decode(data))
    if not text or not audio:
        raise Problem(f"the answer has {len(text)} pieces of text and {len(audio)} of audio", "read the server's log")
    paths = [OUT / "answer.txt", OUT / "answer.wav"]
    paths[0].write_text("".join(text) + "\n")
    write_wav(paths[1], b"".join(audio))
    say(f"  answer: {''.join(text)}")
    say(f"  all after {time.monotonic() - start:.2f} s; {sum(map(len, audio)) / 2 / SPEECH_HZ:.1f} s of speech")
    return paths


def _audio_part(delta: Any, name: str) -> str:
    """A part of `delta.audio`: a field of its own in newer SDKs, an extra in older ones."""
    audio = delta.model_dump().get("audio") or {}
    return audio.get(name) or ""


def fact_of(client: Any, model: str, name: str, default: Any) -> Any:
    """What the model list says of a model beyond OpenAI's own fields."""
    return (client.models.retrieve(model).model_extra or {}).get(name) or default


def write_wav(path: Path, pcm: bytes) -> None:
    """16-bit mono speech as a WAV file."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SPEECH_HZ)
        file.writeframes(pcm)


def paint(client: Any, say: Say) -> Path:
    """Ask for the picture that the model gives as an example of itself; writes picture.png."""
    prompt = fact_of(client, PAINTING, "example", "a picture")
    say(f"\npainting: {prompt}")
    start = time.monotonic()
    answer = client.images.generate(model=PAINTING, prompt=prompt, response_format="b64_json", n=1)
    path = OUT / "picture.png"
    path.write_bytes(base64.b64decode(answer.data[0].b64_json))
    say(f"  done after {time.monotonic() - start:.2f} s")
    return path
