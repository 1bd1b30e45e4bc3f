# SPDX-License-Identifier: Apache-2.0
"""question.wav as text, with the times of its phrases."""

from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url="http://localhost:9000/v1", api_key="none")
with Path("question.wav").open("rb") as file:
    answer = client.audio.transcriptions.create(model="chat", file=file, response_format="verbose_json")
for segment in answer.segments or []:
    print(f"{segment.start:6.2f} {segment.end:6.2f} {segment.text}")
