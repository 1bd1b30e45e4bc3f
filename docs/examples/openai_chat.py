# SPDX-License-Identifier: Apache-2.0
"""A spoken answer from the openai SDK. Needs `make serve`; writes answer.wav."""

import base64
from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url="http://localhost:9000/v1", api_key="none")
answer = client.chat.completions.create(
    model="chat",
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    modalities=["text", "audio"],
    audio={"voice": "heart", "format": "wav"},
    max_tokens=40,
)
audio = answer.choices[0].message.audio
assert audio is not None
print(audio.transcript)
Path("answer.wav").write_bytes(base64.b64decode(audio.data))
