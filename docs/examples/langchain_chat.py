# SPDX-License-Identifier: Apache-2.0
"""A streamed chat from LangChain: `pip install langchain-openai` in an environment of its own."""

from langchain_openai import ChatOpenAI
from pydantic import SecretStr

model = ChatOpenAI(model="chat", base_url="http://localhost:9000/v1", api_key=SecretStr("none"), max_tokens=40)
for chunk in model.stream("Tell me about the sea."):
    print(chunk.content, end="", flush=True)
print()
