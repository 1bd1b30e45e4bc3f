# SPDX-License-Identifier: Apache-2.0
"""Servers of two versions side by side on the tiny qwen3_omni checkpoint, and a client of their OpenAI proxies.

The client is a few lines over bare sockets: on a machine with two cores an SDK would be measured with the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf.harness import Server
from tests.kit.tiny_omni import TEMPLATE, tiny_omni
from triton_omni.backends.supervisor.serve import processes
from triton_omni.backends.supervisor.serve.run_folder import read_json

MODEL = "qwen3_omni"
TOKENS, FRAMES = 48, 40
READY_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 120.0
PROMPTS = (
    "Tell me about the sea, the sky and the old town, in a few sentences.",
    "Why is the fox quick?",
    "Say hello to the world.",
    "What does the dog do all day, and who helps it?",
    "Describe a lazy afternoon in the old town.",
    "Is this a test of speech?",
    "List three animals that jump.",
    "How do images and speech belong together?",
)
OWN = f"exec {sys.executable} -m triton_omni.cli serve"
_TEXT, _AUDIO, _END = (b'"transcript":"', b'"content":"'), b'"data":"', b"[DONE]"


@dataclass
class Answer:
    """When what came of one request, seconds on the monotonic clock. `texts` and `audios` have every piece; `trace` is
    the id of its spans."""

    start_s: float
    trace: str
    texts: list[float] = field(default_factory=list[float])
    audios: list[float] = field(default_factory=list[float])
    end_s: float = 0.0


@dataclass(frozen=True)
class Side:
    """A ready server with its proxy."""

    name: str
    port: int
    processes: Mapping[str, int]

    async def ask(self, prompt: str, spoken: bool, tokens: int = TOKENS) -> Answer:
        """One streamed chat, read to its end. Raises RuntimeError unless it is whole."""
        body: dict[str, Any] = {
            "model": MODEL, "stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "messages": [{"role": "user", "content": prompt}],
            "modalities": ["text", "audio"] if spoken else ["text"],
        }  # fmt: skip
        if spoken:
            body["audio"] = {"voice": "Ethan", "format": "pcm16"}
        sent = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        head = f"host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}\r\n"
        answer = Answer(time.monotonic(), secrets.token_hex(16))
        head += f"traceparent: 00-{answer.trace}-{secrets.token_hex(8)}-01\r\n"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}connection: close\r\n\r\n".encode() + sent)
        said = b""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while line := await reader.readline():
                said += line if not answer.texts else b""
                _note(answer, line)
        writer.close()
        if not answer.end_s or not answer.texts or bool(answer.audios) != spoken:
            raise RuntimeError(f"{self.name}: {said.decode(errors='replace')[:2000]}")
        return answer

    async def load(self, streams: int, requests: int, spoken: bool, tokens: int = TOKENS) -> tuple[list[Answer], float]:
        """`requests` answers in bursts of `streams` that arrive at once, and the wall time of all."""
        began, answers = time.monotonic(), list[Answer]()
        for first in range(0, requests, streams):
            prompts = [PROMPTS[number % len(PROMPTS)] for number in range(first, min(first + streams, requests))]
            answers += await asyncio.gather(*(self.ask(prompt, spoken, tokens) for prompt in prompts))
        return answers, time.monotonic() - began


def _note(answer: Answer, line: bytes) -> None:
    if not line.startswith(b"data: "):
        return
    now = time.monotonic()
    if _END in line:
        answer.end_s = now
    elif _AUDIO in line:
        answer.audios.append(now)
    elif any(key in line and key + b'"' not in line for key in _TEXT):
        answer.texts.append(now)


@contextmanager
def sides(own: str, beside: str, variables: Mapping[str, str], streams: int, dtype: str) -> Iterator[list[Side]]:
    """The server that the shell command `own` starts, and that of `beside` ("": none); both start at once.

    A command is that of `serve` up to its options, such as `cd DIR && exec .runtime/engine/bin/python -m … serve`.
    """
    with tempfile.TemporaryDirectory(prefix="omni-perf-") as folder, ExitStack() as stack:
        deploy = tiny_deploy(Path(folder), streams, dtype)
        commands = {"this": own} | ({"other": beside} if beside else {})
        children: list[subprocess.Popen[bytes]] = []
        infos = {name: Path(folder) / f"{name}.json" for name in commands}
        for name, command in commands.items():
            log = stack.enter_context((Path(folder) / f"{name}.log").open("wb"))
            words = f"{command} {_ports()} --deploy {deploy} --info-file {infos[name]}"
            child = processes.start(["bash", "-c", words], {**os.environ, **variables}, log.fileno(), folder)
            children.append(child)
            stack.callback(processes.stop, child, STOP_TIMEOUT_S)

        def settled() -> bool:
            return all(info.exists() for info in infos.values()) or any(c.poll() is not None for c in children)

        processes.wait_until(settled, READY_TIMEOUT_S)
        if not all(info.exists() for info in infos.values()):
            logs = "".join((Path(folder) / f"{name}.log").read_text()[-3000:] for name in commands)
            raise RuntimeError(f"not ready:\n{logs}")
        yield [_side(name, read_json(info) or {}) for name, info in infos.items()]


def _ports() -> str:
    """Ports that no process is given by chance while the models load."""
    first = random.randrange(15_000, 30_000, 4)
    names = ("http", "grpc", "metrics", "openai")
    return " ".join(f"--{name}-port {first + number}" for number, name in enumerate(names))


def _side(name: str, facts: dict[str, Any]) -> Side:
    server = Server("", Path(facts["run_dir"]), facts["server_pid"])
    return Side(name, facts["openai_port"], {**server.pids(), "proxy": facts.get("proxy_pid", 0)})


def tiny_deploy(folder: Path, streams: int, dtype: str) -> Path:
    """A deploy file of the tiny checkpoint: answers of TOKENS tokens and FRAMES frames."""
    model = str(tiny_omni(folder / "model", real_ids=True))
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")  # where older versions look
    common = {"model": model, "dtype": dtype, "max_num_seqs": streams, "kv_cache_memory_bytes": 64 << 20}
    common |= {"max_model_len": 512}
    thinker = common | {"limit_mm_per_prompt": {"image": 0, "audio": 0, "video": 0}}
    talker = common | {"sampling": {"temperature": 0.0, "max_tokens": FRAMES + 1}}
    engines = {"thinker": thinker, "talker": talker, "code2wav": {"model": model}}
    stages = {stage: {"device": "cpu", "engine": options} for stage, options in engines.items()}
    deploy = folder / "deploy.yaml"
    deploy.write_text(json.dumps({"pipeline": MODEL, "stages": stages}))  # JSON is YAML
    return deploy
