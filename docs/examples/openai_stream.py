# SPDX-License-Identifier: Apache-2.0
"""Text and speech while they are made: prints the text, writes answer.pcm (16-bit mono at 24 kHz)."""

import base64
from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url="http://localhost:9000/v1", api_key="none")
stream = client.chat.completions.create(
    model="chat",
    messages=[{"role": "user", "content": "Tell me about the sea."}],
    modalities=["text", "audio"],
    audio={"voice": "heart", "format": "pcm16"},
    max_tokens=40,
    stream=True,
)
with Path("answer.pcm").open("wb") as file:
    for chunk in stream:
        delta = chunk.choices[0].delta.model_dump() if chunk.choices else {}
        audio = delta.get("audio") or {}
        print(audio.get("transcript") or "", end="", flush=True)
        file.write(base64.b64decode(audio.get("data") or ""))
print()
