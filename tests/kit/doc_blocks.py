# SPDX-License-Identifier: Apache-2.0
"""The fenced code blocks of the documents, with what is said about running them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.kit.proxy_server import RunningProxy
from tests.kit.request_mutations import PNG, WAV
from triton_omni.openai.media import audio as coding

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (not run|run by): (.+?) -->\s*\Z")
PROXY, TRITON = "localhost:9000", "localhost:8001"
"""Where documents and examples expect `make serve`."""
VOICE_NAMES = ("heart", "ryan", "ethan")


@dataclass(frozen=True)
class Block:
    """A block of `document` (path below the root) at `line`; `mark` is "", "not run" or "run by", `why` its text."""

    document: str
    line: int
    language: str
    text: str
    mark: str
    why: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(document: str, text: str) -> list[Block]:
    """The blocks of a document, in their order; a mark is the HTML comment right before the fence."""
    found: list[Block] = []
    for match in FENCE.finditer(text):
        indent, language, body = match.groups()
        mark = MARK.search(text, 0, match.start())
        body = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(document, line, language, body, mark[1] if mark else "", mark[2] if mark else ""))
    return found


def documents() -> dict[str, str]:
    """Path below the root → text of README.md and of the documents of docs, perf and the pipelines."""
    paths = [ROOT / "README.md", ROOT / "perf" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    paths += sorted((ROOT / "backends" / "pipelines").glob("*/README.md"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as lists of words; a command may span lines. Raises ValueError at an open quote."""
    found: list[list[str]] = []
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # inside quotes: the command goes on
            pending += "\n"
            continue
        if words:
            found.append(words)
        pending = ""
    if pending:
        raise ValueError(f"open quote in {pending!r}")
    return found


def at_servers(text: str, proxy: RunningProxy | None, grpc: str = "") -> str:
    """The same program or command, for the servers of a test instead of those of `make serve`."""
    if proxy is not None:
        text = text.replace(PROXY, f"127.0.0.1:{proxy.port}")
    return text.replace(TRITON, grpc) if grpc else text


def write_media(folder: Path) -> None:
    """The files that documents and examples read: a recording and an image."""
    (folder / "question.wav").write_bytes(WAV)
    (folder / "voice.wav").write_bytes(coding.encode("wav", 24_000, [np.full(72_000, 0.1, np.float32)]))
    (folder / "fox.png").write_bytes(PNG)
